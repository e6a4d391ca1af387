{{/* The names, labels and addresses that several objects share. */}}

{{/* The coordinators, and what else has to know their names: the list of their addresses. */}}
{{- define "zeroshard.addresses" -}}
{{- range $index := until (int .Values.coordinators.count) -}}
{{- if $index }},{{ end -}}
zeroshard-coordinator-{{ $index }}.zeroshard-coordinator:7400
{{- end -}}
{{- end -}}

{{/* The image, by its digest if there is one. */}}
{{- define "zeroshard.image" -}}
{{- with .Values.image -}}
{{- .repository -}}
{{- if .digest }}@{{ .digest }}{{ else }}:{{ .tag | default $.Chart.AppVersion }}{{ end -}}
{{- end -}}
{{- end -}}

{{/*
The metadata of an object. The arguments are the context, the name of the object and, for an object
of one role, the role. The release and the version are not in the labels of pods: they would start
all pods again with every upgrade of the chart.
*/}}
{{- define "zeroshard.metadata" -}}
{{- $root := index . 0 -}}
name: {{ index . 1 }}
namespace: {{ $root.Release.Namespace }}
labels:
  app.kubernetes.io/name: zeroshard
  {{- if gt (len .) 2 }}
  app.kubernetes.io/component: {{ index . 2 }}
  {{- end }}
  app.kubernetes.io/part-of: zeroshard
  app.kubernetes.io/instance: {{ $root.Release.Name }}
  app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
  helm.sh/chart: {{ $root.Chart.Name }}-{{ $root.Chart.Version }}
{{- end -}}

{{/* The labels that select the pods of a role. */}}
{{- define "zeroshard.selector" -}}
app.kubernetes.io/name: zeroshard
app.kubernetes.io/component: {{ . }}
{{- end -}}

{{/* Selects the pods of both roles. */}}
{{- define "zeroshard.servers" -}}
matchLabels:
  app.kubernetes.io/name: zeroshard
matchExpressions:
  - key: app.kubernetes.io/component
    operator: In
    values: [coordinator, shard]
{{- end -}}
