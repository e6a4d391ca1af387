{{/* The pods of both roles, which differ in their ports, their sizes and a few variables. */}}

{{/*
A pod template. The argument is a dictionary:

  root      the context of the chart
  role      coordinator or shard
  ports     the ports `grpc` and `admin`
  path      the name of the values of this role
  values    these values
  gpu       the values of its GPU, if it has one
  fields    variables that have the value of a field of the pod
  settings  variables of this role
  standby   whether the pod may wait for an election
  spread    what the scheduler does if it cannot spread the pods; empty if they are not spread
*/}}
{{- define "zeroshard.pod" -}}
{{- $values := .root.Values -}}
{{- $gpu := .gpu | default dict -}}
metadata:
  labels:
    {{- include "zeroshard.selector" .role | nindent 4 }}
    app.kubernetes.io/part-of: zeroshard
spec:
  automountServiceAccountToken: false
  # Variables of services would start with ZEROSHARD_, as those of the server.
  enableServiceLinks: false
  # Longer than preStop and ZEROSHARD_DRAIN_SECONDS together.
  terminationGracePeriodSeconds: 45
  securityContext:
    runAsNonRoot: true
    runAsUser: 65532
    runAsGroup: 65532
    fsGroup: 65532
    seccompProfile: {type: RuntimeDefault}
  {{- with $values.image.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  {{- with .values.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- if or $gpu.enabled .values.tolerations }}
  tolerations:
    {{- if $gpu.enabled }}
    - {key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}
    {{- end }}
    {{- with .values.tolerations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  {{- end }}
  {{- with $gpu.runtimeClass }}
  runtimeClassName: {{ . }}
  {{- end }}
  {{- if .spread }}
  topologySpreadConstraints:
    {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: {{ $.spread }}
      labelSelector:
        matchLabels:
          {{- include "zeroshard.selector" $.role | nindent 10 }}
    {{- end }}
  {{- end }}
  containers:
    - name: {{ .role }}
      image: {{ include "zeroshard.image" .root }}
      imagePullPolicy: IfNotPresent
      command: [zeroshard-server, {{ .role }}]
      env:
        {{- include "zeroshard.environment" . | trim | nindent 8 }}
      {{- with $values.checkpoints.secret }}
      envFrom:
        - secretRef: {name: {{ . }}}
      {{- end }}
      ports:
        - {name: grpc, containerPort: {{ .ports.grpc }}}
        - {name: admin, containerPort: {{ .ports.admin }}}
      startupProbe:
        {{- include "zeroshard.probe" (list . "liveness") | nindent 8 }}
        periodSeconds: 2
        failureThreshold: 60
      livenessProbe:
        {{- include "zeroshard.probe" (list . "liveness") | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        {{- include "zeroshard.probe" (list . "readiness") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 3
      lifecycle:
        # Time for other pods to learn that this one ends.
        preStop: {sleep: {seconds: 3}}
      # Request and limit of the memory are equal, so that the node has the memory that the server has
      # promised to jobs.
      resources:
        requests:
          cpu: {{ .values.cpu | quote }}
          memory: {{ .values.memory }}
          {{- if $gpu.enabled }}
          nvidia.com/gpu: "1"
          {{- end }}
        limits:
          memory: {{ .values.memory }}
          {{- if $gpu.enabled }}
          nvidia.com/gpu: "1"
          {{- end }}
      securityContext:
        allowPrivilegeEscalation: false
        readOnlyRootFilesystem: true
        capabilities: {drop: [ALL]}
      volumeMounts:
        {{- range $name, $volume := include "zeroshard.volumes" . | fromYaml }}
        - {name: {{ $name }}, mountPath: {{ $volume.path }}, readOnly: true}
        {{- end }}
  volumes:
    {{- range $name, $volume := include "zeroshard.volumes" . | fromYaml }}
    - name: {{ $name }}
      secret: {secretName: {{ $volume.secret }}, defaultMode: 0440}
    {{- end }}
{{- end -}}

{{/* The secrets that a pod mounts: their volumes, and where they are. */}}
{{- define "zeroshard.volumes" -}}
token: {secret: {{ .root.Values.tokenSecret }}, path: /run/secrets/zeroshard}
{{- if .root.Values.tls.enabled }}
tls: {secret: {{ .root.Values.tls.secret }}, path: /run/secrets/zeroshard-tls}
{{- end }}
{{- if and (eq .role "coordinator") .values.election.secret }}
etcd: {secret: {{ .values.election.secret }}, path: /run/secrets/zeroshard-etcd}
{{- end }}
{{- end -}}

{{/*
The environment variables of a pod: first those that others contain, then those of the chart, then
those of the user.
*/}}
{{- define "zeroshard.environment" -}}
{{- $values := .root.Values -}}
{{- $fields := .fields | default dict -}}
{{- $set := dict
  "ZEROSHARD_LISTEN" (printf "0.0.0.0:%d" .ports.grpc)
  "ZEROSHARD_ADMIN_LISTEN" (printf "0.0.0.0:%d" .ports.admin)
  "ZEROSHARD_TOKEN_FILE" "/run/secrets/zeroshard/token"
  "ZEROSHARD_DRAIN_SECONDS" "30"
  "ZEROSHARD_LOG_FORMAT" "json"
-}}
{{- $set = merge $set .settings -}}
{{- if $values.tls.enabled -}}
{{- $set = merge $set (dict
  "ZEROSHARD_TLS_CA" "/run/secrets/zeroshard-tls/ca.crt"
  "ZEROSHARD_TLS_CERT" "/run/secrets/zeroshard-tls/tls.crt"
  "ZEROSHARD_TLS_KEY" "/run/secrets/zeroshard-tls/tls.key"
) -}}
{{- end -}}
{{- with $values.traces -}}
{{- if .endpoint -}}
{{- $set = merge $set (dict
  "ZEROSHARD_OTLP_ENDPOINT" .endpoint
  "ZEROSHARD_TRACE_RATIO" (toString .ratio)
) -}}
{{- end -}}
{{- end -}}
{{- $ofUser := dict (printf "%s.env" .path) .values.env "checkpoints.env" $values.checkpoints.env -}}
{{- range $path, $variables := $ofUser -}}
{{- range $name, $value := $variables -}}
{{- if or (hasKey $set $name) (hasKey $fields $name) -}}
{{- fail (printf "%s.%s is %q, but the chart sets this variable from its other values: remove it" $path $name $value) -}}
{{- end -}}
{{- $_ := set $set $name $value -}}
{{- end -}}
{{- end -}}
{{- range $name, $field := $fields }}
- name: {{ $name }}
  valueFrom: {fieldRef: {fieldPath: {{ $field | quote }}}}
{{- end }}
{{- range $name, $value := $set }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end -}}

{{/*
How a probe asks. A standby does not serve gRPC until it leads, and would never be ready; its
readiness is that of its process.
*/}}
{{- define "zeroshard.probe" -}}
{{- with index . 0 -}}
{{- if .standby -}}
httpGet: {path: /healthz, port: admin}
{{- else -}}
grpc: {port: {{ .ports.grpc }}, service: {{ index $ 1 }}}
{{- end -}}
{{- end -}}
{{- end -}}
