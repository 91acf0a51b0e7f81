{{- define "caketin.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "caketin.selectorLabels" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "caketin.labels" -}}
{{ include "caketin.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Head of an object's metadata: name, namespace, labels, annotations. Takes root, component, name, annotations. */}}
{{- define "caketin.metadata" -}}
name: {{ .name }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "caketin.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default dict .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "caketin.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "caketin.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "caketin.image" -}}
{{- $repository := .image.repository -}}
{{- if and .root.Values.image.registry (not .upstream) -}}
{{- $repository = printf "%s/%s" (trimSuffix "/" .root.Values.image.registry) $repository -}}
{{- end -}}
{{- if eq .image.tag "latest" -}}
{{- fail (printf "image %s has the tag latest, of which nobody can say what runs: name a version or a digest" .image.repository) -}}
{{- end -}}
{{- if .image.digest -}}
{{- printf "%s@%s" $repository .image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .root.Chart.AppVersion .image.tag) -}}
{{- end -}}
{{- end -}}

{{/* A quantity such as 8Gi in bytes. */}}
{{- define "caketin.bytes" -}}
{{- $units := dict "" 1 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- $text := toString . -}}
{{- mul (regexFind "^[0-9]+" $text | int64) (get $units (regexFind "[KMGT]i$" $text) | int64) -}}
{{- end -}}

{{/* Where things are. */}}
{{- define "caketin.apiUrl" -}}
{{ ternary "https" "http" .Values.tls.enabled }}://{{ include "caketin.fullname" . }}-api.{{ .Release.Namespace }}.svc:{{ .Values.api.service.port }}
{{- end -}}

{{- define "caketin.masterHost" -}}
{{ include "caketin.fullname" . }}-mooncake-master.{{ .Release.Namespace }}.svc
{{- end -}}

{{- define "caketin.master" -}}
{{- if eq .Values.mooncake.mode "external" -}}
{{- .Values.mooncake.external.master -}}
{{- else -}}
{{ include "caketin.masterHost" . }}:{{ .Values.mooncake.master.port }}
{{- end -}}
{{- end -}}

{{- define "caketin.masterHttp" -}}
{{- if eq .Values.mooncake.mode "external" -}}
{{- .Values.mooncake.external.masterHttp -}}
{{- else -}}
{{ include "caketin.masterHost" . }}:{{ .Values.mooncake.master.metricsPort }}
{{- end -}}
{{- end -}}

{{- define "caketin.tokensSecret" -}}
{{- default (printf "%s-tokens" (include "caketin.fullname" .)) .Values.auth.existingSecret -}}
{{- end -}}

{{/* Who holds the tokens themselves: of the made file, or as the values say. */}}
{{- define "caketin.engineTokenSecret" -}}
{{- if and .Values.auth.existingSecret (not .Values.auth.engineTokenSecret) -}}
{{- fail "auth.engineTokenSecret is needed where auth.existingSecret is given: the agent and the test show a token" -}}
{{- end -}}
{{- default (printf "%s-engine-token" (include "caketin.fullname" .)) .Values.auth.engineTokenSecret -}}
{{- end -}}

{{- define "caketin.scraperTokenSecret" -}}
{{- if and .Values.auth.existingSecret (not .Values.auth.scraperTokenSecret) -}}
{{- fail "auth.scraperTokenSecret is needed where auth.existingSecret is given: Prometheus shows a token" -}}
{{- end -}}
{{- default (printf "%s-scraper-token" (include "caketin.fullname" .)) .Values.auth.scraperTokenSecret -}}
{{- end -}}
