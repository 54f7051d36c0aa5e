{{/* Names. 40 characters leave space for the suffixes that Kubernetes adds to a StatefulSet's name, in labels of 63. */}}
{{- define "outrider.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Selector labels of a component's pods. Takes root and component, like most below. */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "outrider.labels" -}}
{{ include "outrider.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: outrider
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "outrider.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "outrider.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "outrider.image" -}}
{{- $image := index .root.Values.image .name -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ default .root.Chart.AppVersion $image.tag }}
{{- end -}}
{{- end -}}

{{- define "outrider.fleetSecret" -}}
{{- default (printf "%s-fleet" (include "outrider.fullname" .)) .Values.auth.fleetKey.existingSecret -}}
{{- end -}}

{{- define "outrider.drafterSecret" -}}
{{- default (printf "%s-drafter" (include "outrider.fullname" .)) .Values.auth.drafterKey.existingSecret -}}
{{- end -}}

{{/* The drafter in a verifier's process, if there is one. */}}
{{- define "outrider.ownDrafter" -}}
{{- if eq .component "verifier" -}}{{ get .root.Values.verifier.settings "own-drafter" }}{{- end -}}
{{- end -}}

{{/* Key of a component: a drafter has only the drafter key, if there is one, a verifier with its own drafter both, and the
     pod of `helm test` none. */}}
{{- define "outrider.hasDrafterKey" -}}
{{- $both := and .root.Values.auth.fleetKey.enabled .root.Values.auth.drafterKey.enabled -}}
{{- if and $both (ne .component "test") (or (ne .component "verifier") (include "outrider.ownDrafter" .)) }}yes{{ end -}}
{{- end -}}

{{- define "outrider.hasFleetKey" -}}
{{- $own := and (eq .component "drafter") .root.Values.auth.drafterKey.enabled -}}
{{- if and .root.Values.auth.fleetKey.enabled (not $own) (ne .component "test") }}yes{{ end -}}
{{- end -}}

{{- define "outrider.apiKeysSecret" -}}
{{- default (printf "%s-api-keys" (include "outrider.fullname" .)) .Values.auth.apiKeys.existingSecret -}}
{{- end -}}

{{- define "outrider.redisSecret" -}}
{{- $own := printf "%s-redis" (include "outrider.fullname" .) -}}
{{- if .Values.redis.bundled -}}{{ $own }}{{- else -}}{{ default $own .Values.redis.existingSecret }}{{- end -}}
{{- end -}}

{{/* Existing value of a Secret, or a new one. Takes root, secret and key. */}}
{{- define "outrider.keptOrNew" -}}
{{- $old := lookup "v1" "Secret" .root.Release.Namespace .secret -}}
{{- $data := default dict $old.data -}}
{{- if hasKey $data .key -}}{{ index $data .key | b64dec }}{{- else -}}{{ randAlphaNum 48 }}{{- end -}}
{{- end -}}

{{/* Settings of a service as flags. */}}
{{- define "outrider.settings" -}}
{{- $values := index .root.Values .component -}}
{{- $derived := include "outrider.derivedSettings" . | fromJson -}}
{{- range $flag, $value := mergeOverwrite (deepCopy .root.Values.settings) $values.settings $derived }}
{{- if kindIs "bool" $value }}
- --{{ if not $value }}no-{{ end }}{{ $flag }}
{{- else }}
- {{ printf "--%s=%s" $flag (kindIs "string" $value | ternary $value (toJson $value)) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Environment of every Outrider container: references to keys and certificates, never their values. The health check
     of an exec probe and `outrider` inside the container read the same variables. */}}
{{- define "outrider.identity" -}}
{{- if not (ternary (include "outrider.hasApiKeys" .root) .root.Values.auth.fleetKey.enabled (eq .component "coordinator")) }}
# Accessible from the whole cluster: no keys are configured.
- name: OUTRIDER_INSECURE
  value: "true"
{{- end }}
{{- if include "outrider.hasFleetKey" . }}
- name: OUTRIDER_FLEET_KEY
  value: "@/etc/outrider/keys/fleet-key"
{{- end }}
{{- if include "outrider.hasDrafterKey" . }}
- name: OUTRIDER_DRAFTER_KEY
  value: "@/etc/outrider/keys/drafter-key"
{{- end }}
{{- if and (eq .component "coordinator") (include "outrider.hasApiKeys" .root) }}
- name: OUTRIDER_API_KEYS
  value: "@/etc/outrider/keys/api-keys"
{{- end }}
{{- if .root.Values.tls.secretName }}
- name: OUTRIDER_TLS_CERT
  value: /etc/outrider/tls/tls.crt
- name: OUTRIDER_TLS_KEY
  value: /etc/outrider/tls/tls.key
- name: OUTRIDER_TLS_CA
  value: /etc/outrider/tls/ca.crt
{{- if .root.Values.tls.clientAuth }}
- name: OUTRIDER_TLS_CLIENT_AUTH
  value: "true"
{{- end }}
{{- end }}
{{- with .root.Values.tracing.otlpEndpoint }}
- name: OUTRIDER_OTLP_ENDPOINT
  value: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "outrider.hasApiKeys" -}}
{{- if or .Values.auth.apiKeys.keys .Values.auth.apiKeys.existingSecret }}yes{{ end -}}
{{- end -}}

{{- define "outrider.hasKeys" -}}
{{- $client := and (eq .component "coordinator") (include "outrider.hasApiKeys" .root) -}}
{{- if or $client (include "outrider.hasFleetKey" .) (include "outrider.hasDrafterKey" .) }}yes{{ end -}}
{{- end -}}

{{- define "outrider.identityMounts" -}}
{{- if include "outrider.hasKeys" . }}
- name: keys
  mountPath: /etc/outrider/keys
  readOnly: true
{{- end }}
{{- if .root.Values.tls.secretName }}
- name: tls
  mountPath: /etc/outrider/tls
  readOnly: true
{{- end }}
{{- end -}}

{{- define "outrider.identityVolumes" -}}
{{- if include "outrider.hasKeys" . }}
- name: keys
  projected:
    defaultMode: 0440
    sources:
      {{- if include "outrider.hasFleetKey" . }}
      - secret:
          name: {{ include "outrider.fleetSecret" .root }}
          items:
            - key: {{ .root.Values.auth.fleetKey.secretKey }}
              path: fleet-key
      {{- end }}
      {{- if include "outrider.hasDrafterKey" . }}
      - secret:
          name: {{ include "outrider.drafterSecret" .root }}
          items:
            - key: {{ .root.Values.auth.drafterKey.secretKey }}
              path: drafter-key
      {{- end }}
      {{- if and (eq .component "coordinator") (include "outrider.hasApiKeys" .root) }}
      - secret:
          name: {{ include "outrider.apiKeysSecret" .root }}
          items:
            - key: {{ .root.Values.auth.apiKeys.secretKey }}
              path: api-keys
      {{- end }}
{{- end }}
{{- if .root.Values.tls.secretName }}
- name: tls
  secret:
    secretName: {{ .root.Values.tls.secretName }}
    defaultMode: 0440
{{- end }}
{{- end -}}

{{/* Probe. Kubernetes has no TLS for gRPC probes, so with TLS the container runs the health check itself.
     Takes root, port and service; an empty service means the whole process. */}}
{{- define "outrider.probe" -}}
{{- if .root.Values.tls.secretName -}}
exec:
  command: [python, /opt/healthcheck.py, "127.0.0.1:{{ .port }}", {{ .service | quote }}]
{{- else -}}
grpc:
  port: {{ .port }}
  {{- with .service }}
  service: {{ . }}
  {{- end }}
{{- end -}}
{{- end -}}

{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ .user }}
runAsGroup: {{ .user }}
fsGroup: {{ .user }}
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "outrider.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Scrape annotations, for Prometheus without its operator. Takes root, port and scheme. */}}
{{- define "outrider.scrape" -}}
{{- if .root.Values.metrics.annotations }}
prometheus.io/scrape: "true"
prometheus.io/port: {{ .port | quote }}
prometheus.io/path: /metrics
prometheus.io/scheme: {{ .scheme }}
{{- end }}
{{- end -}}

{{/* Placement of a pod. */}}
{{- define "outrider.placement" -}}
{{- $values := default dict (index .root.Values .component) -}}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $values.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if $values.affinity }}
affinity:
  {{- toYaml $values.affinity | nindent 2 }}
{{- else if and (eq .component "drafter") (ne $values.apart "off") }}
affinity:
  podAntiAffinity:
    {{- if eq $values.apart "required" }}
    requiredDuringSchedulingIgnoredDuringExecution:
      - topologyKey: kubernetes.io/hostname
        labelSelector:
          matchLabels:
            {{- include "outrider.selector" (dict "root" .root "component" "verifier") | nindent 12 }}
    {{- else }}
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "outrider.selector" (dict "root" .root "component" "verifier") | nindent 14 }}
    {{- end }}
{{- end }}
{{- if $values.spread }}
topologySpreadConstraints:
  {{- range $values.spread }}
  - topologyKey: {{ . }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "outrider.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}
