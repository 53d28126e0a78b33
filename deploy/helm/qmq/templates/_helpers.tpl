{{/* Names and the parts that several kinds of pods share. The argument is a dict: root (the chart's scope), name (the component's), and what a
part needs besides. */}}

{{- define "qmq.fullname" -}}
{{- if contains "qmq" .Release.Name }}{{ .Release.Name | trunc 30 | trimSuffix "-" }}{{ else }}{{ printf "%s-qmq" .Release.Name | trunc 30 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "qmq.component" -}}
{{ include "qmq.fullname" .root }}-{{ .name }}
{{- end }}

{{- define "qmq.selector" -}}
app.kubernetes.io/name: qmq
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .name }}
{{- end }}

{{- define "qmq.labels" -}}
{{ include "qmq.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: qmq
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "qmq.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "qmq.service-account" -}}
{{ include "qmq.fullname" . }}
{{- end }}

{{/* What every pod has, at the level of its spec: the restricted pod security standard. */}}
{{- define "qmq.pod" -}}
serviceAccountName: {{ include "qmq.service-account" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ .hosts | default "ScheduleAnyway" }}
    labelSelector:
      matchLabels: {{- include "qmq.selector" . | nindent 8 }}
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: {{ .zones | default "ScheduleAnyway" }}
    labelSelector:
      matchLabels: {{- include "qmq.selector" . | nindent 8 }}
{{- end }}

{{/* What every container has. */}}
{{- define "qmq.container" -}}
image: {{ include "qmq.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* The kubelet asks the serving process itself, over HTTP: a probe costs no process. */}}
{{- define "qmq.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" .root.Values.tls.enabled }}
startupProbe:
  httpGet: {path: /livez, port: metrics, scheme: {{ $scheme }}}
  periodSeconds: 2
  failureThreshold: {{ div .root.Values.startupSeconds 2 }}
livenessProbe:
  httpGet: {path: /livez, port: metrics, scheme: {{ $scheme }}}
  periodSeconds: 15
  timeoutSeconds: 10
  failureThreshold: 4
readinessProbe:
  httpGet: {path: /readyz, port: metrics, scheme: {{ $scheme }}}
  periodSeconds: 5
  timeoutSeconds: 5
{{- end }}

{{/* A pod that ends still serves for a moment, in which its Service stops sending it new connections. */}}
{{- define "qmq.leave-service" -}}
lifecycle:
  preStop: {exec: {command: [sleep, "3"]}}
{{- end }}

{{/* Addresses of the metaservers, for what is a client of the cluster. */}}
{{- define "qmq.servers" -}}
{{ include "qmq.component" (dict "root" . "name" "meta") }}.{{ .Release.Namespace }}.svc:20880
{{- end }}

{{- define "qmq.env-server" -}}
- name: QMQ_ETCD
  value: {{ join "," .root.Values.etcd.endpoints | quote }}
- {name: QMQ_HOST, value: "0.0.0.0"}
- {name: QMQ_METRICS_HOST, value: "0.0.0.0"}
- {name: QMQ_METRICS_PORT, value: "20890"}
{{- with .root.Values.etcd.tlsSecret }}
- {name: QMQ_ETCD_CA, value: /etcd-certs/ca.crt}
- {name: QMQ_ETCD_CERT, value: /etcd-certs/tls.crt}
- {name: QMQ_ETCD_KEY, value: /etcd-certs/tls.key}
{{- end }}
{{- if .root.Values.tls.enabled }}
- {name: QMQ_TLS_CLIENTS, value: {{ .root.Values.tls.clients }}}
{{- if eq .root.Values.tls.clients "optional" }}
- {name: QMQ_INSECURE, value: "1"}
{{- end }}
- {name: QMQ_ADMINS, value: {{ .root.Values.tls.admins | quote }}}
{{- else }}
- {name: QMQ_INSECURE, value: "1"}
{{- end }}
{{- include "qmq.env-tls" . }}
{{- end }}

{{- define "qmq.env-tls" }}
{{- if .root.Values.tls.enabled }}
- {name: QMQ_TLS_CA, value: /certs/ca.crt}
- {name: QMQ_TLS_CERT, value: /certs/tls.crt}
- {name: QMQ_TLS_KEY, value: /certs/tls.key}
{{- end }}
{{- end }}

{{- define "qmq.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .root.Values.tls.enabled }}
- {name: certs, mountPath: /certs, readOnly: true}
{{- end }}
{{- if and .etcd .root.Values.etcd.tlsSecret }}
- {name: etcd-certs, mountPath: /etcd-certs, readOnly: true}
{{- end }}
{{- end }}

{{- define "qmq.volumes" -}}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- if .root.Values.tls.enabled }}
- name: certs
  secret: {secretName: {{ include "qmq.component" . }}-tls, defaultMode: 0440}
{{- end }}
{{- if and .etcd .root.Values.etcd.tlsSecret }}
- name: etcd-certs
  secret: {secretName: {{ .root.Values.etcd.tlsSecret }}, defaultMode: 0440}
{{- end }}
{{- end }}
