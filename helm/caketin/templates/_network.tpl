{{/* Who uses the API and the store: pods with the clients' label, agents, the chart's test, nodes. */}}
{{- define "caketin.clientPeers" -}}
- namespaceSelector: {}
  podSelector:
    matchLabels:
      {{- toYaml .Values.networkPolicy.clientLabels | nindent 6 }}
{{- if .Values.agent.enabled }}
- podSelector:
    matchLabels:
      {{- include "caketin.selectorLabels" (dict "root" . "component" "agent") | nindent 6 }}
{{- end }}
{{- if .Values.tests.enabled }}
- podSelector:
    matchLabels:
      {{- include "caketin.selectorLabels" (dict "root" . "component" "test") | nindent 6 }}
{{- end }}
{{- range .Values.networkPolicy.nodeCIDRs }}
- ipBlock: {cidr: {{ . }}}
{{- end }}
{{- end -}}

{{- define "caketin.dnsEgress" -}}
- to:
    - namespaceSelector: {}
      podSelector:
        matchLabels: {k8s-app: kube-dns}
  ports:
    - {port: 53, protocol: UDP}
    - {port: 53, protocol: TCP}
{{- end -}}

{{- define "caketin.apiEgress" -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "caketin.selectorLabels" (dict "root" . "component" "api") | nindent 10 }}
  ports:
    - {port: http, protocol: TCP}
{{- end -}}

{{/* A rule without `to` allows every address: what an external service is reached by is not known here. */}}
{{- define "caketin.redisEgress" -}}
{{- if eq .Values.redis.mode "bundled" -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "caketin.selectorLabels" (dict "root" . "component" "redis") | nindent 10 }}
  ports:
    - {port: redis, protocol: TCP}
{{- else -}}
{{- include "caketin.cidrEgress" .Values.networkPolicy.externalRedisCIDRs -}}
{{- end -}}
{{- end -}}

{{- define "caketin.masterEgress" -}}
{{- if eq .Values.mooncake.mode "bundled" -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "caketin.selectorLabels" (dict "root" . "component" "mooncake-master") | nindent 10 }}
  ports:
    - {port: rpc, protocol: TCP}
    - {port: metrics, protocol: TCP}
{{- else -}}
{{- include "caketin.cidrEgress" .Values.networkPolicy.externalMooncakeCIDRs -}}
{{- end -}}
{{- end -}}

{{- define "caketin.storageEgress" -}}
{{- if eq .Values.mooncake.mode "bundled" -}}
- to:
    - podSelector:
        matchLabels:
          {{- include "caketin.selectorLabels" (dict "root" . "component" "mooncake-storage") | nindent 10 }}
    {{- range .Values.networkPolicy.nodeCIDRs }}
    - ipBlock: {cidr: {{ . }}}
    {{- end }}
  ports:
    - {port: {{ .Values.mooncake.storage.portRange.first }}, endPort: {{ .Values.mooncake.storage.portRange.last }}, protocol: TCP}
{{- else -}}
{{- include "caketin.cidrEgress" .Values.networkPolicy.externalMooncakeCIDRs -}}
{{- end -}}
{{- end -}}

{{- define "caketin.cidrEgress" -}}
{{- if . -}}
- to:
    {{- range . }}
    - ipBlock: {cidr: {{ . }}}
    {{- end }}
{{- else -}}
- {}
{{- end -}}
{{- end -}}
