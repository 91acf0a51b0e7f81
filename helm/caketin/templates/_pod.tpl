{{/* What all pods share. enableServiceLinks is off because Kubernetes would set CAKETIN_PORT=tcp://... for a
     Service named caketin, and the settings class would read it. Takes root, block (the component's values). */}}
{{- define "caketin.podHead" -}}
serviceAccountName: {{ include "caketin.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .block.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .block.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "caketin.podMetadata" -}}
labels:
  {{- include "caketin.labels" . | nindent 2 }}
  {{- with .block.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with merge (dict) (default dict .checksums) .block.podAnnotations .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Ordinary parts run as a user without a name. */}}
{{- define "caketin.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "caketin.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* RDMA locks memory past any limit with IPC_LOCK, which works for root only: Kubernetes adds capabilities to
     the bounding set, where another user does not have them. Root keeps nothing else. */}}
{{- define "caketin.rdmaPodSecurity" -}}
runAsUser: 0
runAsGroup: 0
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "caketin.rdmaContainerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
  add: [IPC_LOCK]
{{- end -}}

{{/* First words of a command that locks memory: Kubernetes has no field for memlock. As far up as it may go. */}}
{{- define "caketin.raiseMemlock" -}}
ulimit -l unlimited 2>/dev/null || ulimit -l "$(ulimit -H -l)"; ulimit -c 0;
{{- end -}}

{{/* Variables that Mooncake reads for RDMA. */}}
{{- define "caketin.rdmaEnv" -}}
{{- if eq .Values.store.protocol "rdma" }}
{{- range $name, $value := dict "MC_GID_INDEX" .Values.rdma.gidIndex "MC_IB_TC" .Values.rdma.trafficClass "MC_IB_SL" .Values.rdma.serviceLevel "MC_MTU" .Values.rdma.mtu }}
{{- if not (kindIs "invalid" $value) }}
- {name: {{ $name }}, value: {{ toString $value | quote }}}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "caketin.extraEnv" -}}
{{- with .extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Resources of a part that lends memory. Takes cpu {request, limit}, bytes, overhead, hugepages, rdma, root. */}}
{{- define "caketin.memoryResources" -}}
{{- $overhead := include "caketin.bytes" .overhead | int64 -}}
{{- $memory := $overhead -}}
{{- if not .hugepages }}{{- $memory = add $overhead .bytes -}}{{- end -}}
{{- $extended := dict -}}
{{- if .hugepages }}{{- $_ := set $extended (printf "hugepages-%s" .hugepages) (toString .bytes) -}}{{- end -}}
{{- if .rdma }}{{- $_ := set $extended .root.Values.rdma.resourceName (toString .root.Values.rdma.count) -}}{{- end -}}
requests:
  cpu: {{ .cpu.request | quote }}
  memory: {{ $memory | quote }}
  {{- range $name, $value := $extended }}
  {{ $name }}: {{ $value | quote }}
  {{- end }}
limits:
  {{- with .cpu.limit }}
  cpu: {{ . | quote }}
  {{- end }}
  memory: {{ $memory | quote }}
  {{- range $name, $value := $extended }}
  {{ $name }}: {{ $value | quote }}
  {{- end }}
{{- end -}}
