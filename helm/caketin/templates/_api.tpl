{{/* The control plane's settings file. Redis' URL may hold a password and comes from a variable. */}}
{{- define "caketin.apiConfig" -}}
host = "0.0.0.0"
port = 7411
token_file = "/etc/caketin/tokens/tokens.toml"
{{- if .Values.tls.enabled }}
tls_cert = "/etc/caketin/tls/tls.crt"
tls_key = "/etc/caketin/tls/tls.key"
{{- end }}
{{- range $name, $value := .Values.api.config }}
{{- if kindIs "float64" $value }}
{{- /* Helm reads every number as a float; people are to read 8388608, not 8.388608e+06. */}}
{{ $name }} = {{ if eq (floor $value) $value }}{{ int64 $value }}{{ else }}{{ $value }}{{ end }}
{{- else }}
{{ $name }} = {{ toJson $value }}
{{- end }}
{{- end }}

[store]
kind = "mooncake"
master = {{ include "caketin.master" . | quote }}
metadata = {{ .Values.store.metadata | quote }}
protocol = {{ .Values.store.protocol | quote }}
devices = {{ .Values.rdma.devices | quote }}
{{- end -}}

{{/* Time for the drain, the last requests, and what has to be ended by force. */}}
{{- define "caketin.apiGraceSeconds" -}}
{{- add (int .Values.api.drainSeconds) (ceil .Values.api.config.shutdown_seconds | int) 10 -}}
{{- end -}}

{{- define "caketin.apiProbe" -}}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ ternary "HTTPS" "HTTP" .root.Values.tls.enabled }}
timeoutSeconds: 3
{{- end -}}
