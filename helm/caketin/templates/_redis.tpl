{{- define "caketin.redisSecret" -}}
{{- default (printf "%s-redis" (include "caketin.fullname" .)) .Values.redis.bundled.existingSecret -}}
{{- end -}}

{{/* URL of an external Redis from its parts; the password comes from a variable that Kubernetes fills in. */}}
{{- define "caketin.redisUrlFromParts" -}}
{{- $r := .Values.redis.external -}}
{{- $scheme := ternary "rediss" "redis" $r.tls -}}
{{- if ne $r.topology "single" }}{{- $scheme = printf "%s+%s" $scheme $r.topology -}}{{- end -}}
{{- $who := $r.username -}}
{{- if $r.passwordSecret }}{{- $who = printf "%s:$(REDIS_PASSWORD)" $who -}}{{- end -}}
{{- if $who }}{{- $who = printf "%s@" $who -}}{{- end -}}
{{- $path := "" -}}
{{- if eq $r.topology "sentinel" }}{{- $_ := required "redis.external.service is needed: the name that the Sentinels know the primary by" $r.service }}{{- $path = printf "/%s" $r.service -}}{{- end -}}
{{- if ne $r.topology "cluster" }}{{- $path = printf "%s/%d" $path (int $r.database) -}}{{- end -}}
{{- $query := ternary "?ssl_ca_certs=/etc/caketin/redis-ca/ca.crt" "" (ne $r.caSecret "") -}}
{{- printf "%s://%s%s%s%s" $scheme $who (join "," $r.hosts) $path $query -}}
{{- end -}}

{{/* Environment that says where Redis is. */}}
{{- define "caketin.redisEnv" -}}
{{- $r := .Values.redis.external -}}
{{- if eq .Values.redis.mode "bundled" -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ include "caketin.redisSecret" . }}, key: password}
- name: CAKETIN_REDIS_URL
  value: redis://:$(REDIS_PASSWORD)@{{ include "caketin.fullname" . }}-redis.{{ .Release.Namespace }}.svc:6379/0
{{- else if $r.existingSecret -}}
- name: CAKETIN_REDIS_URL
  valueFrom:
    secretKeyRef: {name: {{ $r.existingSecret }}, key: {{ $r.urlKey }}}
{{- else if $r.url -}}
{{- if regexMatch "://[^/@]*:[^/@]+@" $r.url }}{{ fail "redis.external.url holds a password, which belongs in a Secret: use redis.external.existingSecret, or hosts and passwordSecret" }}{{ end -}}
- name: CAKETIN_REDIS_URL
  value: {{ $r.url | quote }}
{{- else -}}
{{- if $r.passwordSecret -}}
- name: REDIS_PASSWORD
  valueFrom:
    secretKeyRef: {name: {{ $r.passwordSecret }}, key: {{ $r.passwordKey }}}
{{ end -}}
- name: CAKETIN_REDIS_URL
  value: {{ include "caketin.redisUrlFromParts" . | quote }}
{{- end -}}
{{- end -}}
