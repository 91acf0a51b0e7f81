{{/* Everything that the agent is told, in one place. */}}
{{- define "caketin.agentArgs" -}}
- agent
- --socket={{ .Values.agent.socketDir }}/agent.sock
- --shared-dir={{ .Values.agent.sharedDir }}
- --memory={{ include "caketin.bytes" .Values.agent.hostMemory }}
- --url={{ include "caketin.apiUrl" . }}
- --token-file=/etc/caketin/token/token
- --drain-seconds={{ .Values.agent.drainSeconds }}
{{- range .Values.agent.allowedUids }}
- --allow-uid={{ . }}
{{- end }}
{{- if .Values.agent.metrics.enabled }}
- --host=0.0.0.0
- --port={{ .Values.agent.metrics.port }}
{{- end }}
{{- end -}}
