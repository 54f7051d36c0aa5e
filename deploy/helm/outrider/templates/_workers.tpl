{{/* Pods of the verifier and the drafter. */}}

{{/* Whether a verifier is a group of pods, one on each node. */}}
{{- define "outrider.grouped" -}}
{{- if and (eq .component "verifier") (gt (int .root.Values.verifier.vllm.nodes) 1) }}yes{{ end -}}
{{- end -}}

{{/* Settings that follow from other values, as a dictionary in JSON; and a refusal of values that do not fit together. */}}
{{- define "outrider.derivedSettings" -}}
{{- $derived := dict -}}
{{- if eq .component "verifier" -}}
{{- $values := .root.Values.verifier -}}
{{- $given := $values.settings -}}
{{- $gpus := int $values.gpu.count -}}
{{- $nodes := int $values.vllm.nodes -}}
{{- $engine := get $given "engine" -}}
{{- if gt (int (get $given "pipeline-parallel")) 1 -}}
{{- fail "verifier.settings.pipeline-parallel: only 1, since texts differed; use tensor-parallel over all GPUs" -}}
{{- end -}}
{{- if $values.vllm.enabled -}}
{{- if and $engine (ne $engine "vllm") -}}
{{- fail (printf "verifier.settings.engine is %s, but verifier.vllm.enabled needs vllm" $engine) -}}
{{- end -}}
{{- $places := mul (max $gpus 1) $nodes -}}
{{- $processes := int (default $places (get $given "tensor-parallel")) -}}
{{- if and $gpus (ne $processes (int $places)) -}}
{{- fail (printf "verifier: tensor-parallel %d, but gpu.count %d x vllm.nodes %d = %d GPUs" $processes $gpus $nodes $places) -}}
{{- end -}}
{{- if mod $processes $nodes -}}
{{- fail (printf "verifier: tensor-parallel %d cannot be divided over vllm.nodes %d" $processes $nodes) -}}
{{- end -}}
{{- if and (gt (div $processes $nodes) 1) (not $values.sharedMemory) -}}
{{- fail (printf "verifier: %d processes in a pod talk through shared memory: set verifier.sharedMemory, e.g. 8Gi" (div $processes $nodes)) -}}
{{- end -}}
{{- $derived = dict "engine" "vllm" "tensor-parallel" $processes -}}
{{- if gt $nodes 1 -}}
{{- $group := "--nnodes=$(LWS_GROUP_SIZE) --node-rank=$(LWS_WORKER_INDEX) --master-addr=$(LWS_LEADER_ADDRESS)" -}}
{{- $_ := set $derived "vllm-args" (trim (printf "%s %s" (get $given "vllm-args") $group)) -}}
{{- end -}}
{{- else -}}
{{- if gt $nodes 1 -}}
{{- fail (printf "verifier.vllm.nodes is %d: several nodes need verifier.vllm.enabled" $nodes) -}}
{{- end -}}
{{- if and (gt $gpus 1) (not (hasKey $given "tensor-parallel")) -}}
{{- $derived = dict "tensor-parallel" $gpus -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $derived -}}
{{- end -}}

{{/* Claims of a worker's pods. Takes the component's values. */}}
{{- define "outrider.claims" -}}
{{- if and .cache.persistent (not .cache.volume) }}
volumeClaimTemplates:
  - metadata:
      name: cache
    spec:
      accessModes: [ReadWriteOnce]
      {{- with .cache.storageClass }}
      storageClassName: {{ . }}
      {{- end }}
      resources:
        requests:
          storage: {{ .cache.size }}
{{- end }}
{{- end -}}

{{/* Pod template of a worker. Takes root, component and follower: a pod that only runs processes of a verifier whose
     leader serves. It starts with the same command line, which has its rank. */}}
{{- define "outrider.workerPod" -}}
{{- $root := .root -}}
{{- $component := .component -}}
{{- $me := dict "root" $root "component" $component -}}
{{- $values := index $root.Values $component -}}
{{- $full := include "outrider.fullname" $root -}}
{{- $name := printf "%s-%s" $full $component -}}
{{- $port := $component | eq "verifier" | ternary 50051 50052 -}}
{{- $metrics := $component | eq "verifier" | ternary 9101 9102 -}}
{{- $scheme := index (default dict $values.settings) "metrics-tls" | toString | eq "true" | ternary "https" "http" -}}
{{- $service := printf "outrider.v1.%s" (title $component) -}}
{{- $security := include "outrider.containerSecurity" $root -}}
{{- $image := and (eq $component "verifier") $root.Values.verifier.vllm.enabled | ternary "vllm" "worker" -}}
metadata:
  labels:
    {{- include "outrider.labels" $me | nindent 4 }}
    {{- with $values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    kubectl.kubernetes.io/default-container: {{ $component }}
    {{- if not .follower }}
    {{- include "outrider.scrape" (dict "root" $root "port" $metrics "scheme" $scheme) | nindent 4 }}
    {{- end }}
    {{- with $values.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "outrider.serviceAccount" $root }}
  automountServiceAccountToken: false
  # Kubernetes would set variables such as OUTRIDER_VERIFIER_SERVICE_HOST; unknown OUTRIDER_ variables are errors.
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $root.Values.drainSeconds 20 }}
  securityContext:
    {{- include "outrider.podSecurity" (dict "user" 10001) | nindent 4 }}
  {{- include "outrider.placement" $me | nindent 2 }}
  initContainers:
    # The image links its models into this directory, but a Kubernetes volume starts empty and hides them.
    - name: link-models
      image: {{ include "outrider.image" (dict "root" $root "name" $image) | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command:
        - sh
        - -ec
        - |
          mkdir -p "$OUTRIDER_HOME/models"
          for model in /opt/models/*; do
            link="$OUTRIDER_HOME/models/${model##*/}"
            [ -e "$link" ] || [ ! -e "$model" ] || ln -sfn "$model" "$link"
          done
      resources:
        {{- toYaml $root.Values.initResources | nindent 8 }}
      securityContext:
        {{- $security | nindent 8 }}
      volumeMounts:
        - name: cache
          mountPath: /var/lib/outrider
  containers:
    - name: {{ $component }}
      image: {{ include "outrider.image" (dict "root" $root "name" $image) | quote }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      args:
        - {{ $component }}
        - {{ printf "--host=%s" $root.Values.host | quote }}
        - --port={{ $port }}
        - --metrics-port={{ $metrics }}
        - --coordinators={{ $full }}-registry:50050
        - --advertise=$(POD_NAME).{{ $name }}.{{ $root.Release.Namespace }}.svc:{{ $port }}
        - --drain-s={{ $root.Values.drainSeconds }}
        - {{ printf "--target=%s" $root.Values.target | quote }}
        {{- if eq $component "drafter" }}
        - {{ printf "--kind=%s" $values.kind | quote }}
        {{- with $values.model }}
        - {{ printf "--model=%s" . | quote }}
        {{- end }}
        {{- end }}
        {{- include "outrider.settings" $me | nindent 8 }}
      env:
        - name: POD_NAME
          valueFrom:
            fieldRef:
              fieldPath: metadata.name
        {{- if eq (include "outrider.grouped" .) "yes" }}
        # Where vLLM's processes of the other nodes find those of this one.
        - name: VLLM_HOST_IP
          valueFrom:
            fieldRef:
              fieldPath: status.podIP
        {{- end }}
        {{- if and (dig "limits" "cpu" "" $values.resources) (not (hasKey $values.settings "threads")) }}
        - name: OUTRIDER_THREADS
          valueFrom:
            resourceFieldRef:
              resource: limits.cpu
        {{- end }}
        {{- with $root.Values.hub.existingSecret }}
        - name: HF_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ . }}
              key: {{ $root.Values.hub.secretKey }}
        {{- end }}
        {{- if $root.Values.hub.offline }}
        - name: HF_HUB_OFFLINE
          value: "1"
        {{- end }}
        {{- include "outrider.identity" $me | nindent 8 }}
        {{- with $values.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- if not .follower }}
      ports:
        - name: grpc
          containerPort: {{ $port }}
        - name: metrics
          containerPort: {{ $metrics }}
        {{- if include "outrider.ownDrafter" $me }}
        - name: drafter-metrics
          containerPort: 9102
        {{- end }}
      # It listens once its model is loaded and warm.
      startupProbe:
        {{- include "outrider.probe" (dict "root" $root "port" $port "service" "") | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: {{ div (add $values.startupSeconds 4) 5 }}
      livenessProbe:
        {{- include "outrider.probe" (dict "root" $root "port" $port "service" "") | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        {{- include "outrider.probe" (dict "root" $root "port" $port "service" $service) | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      {{- end }}
      resources:
        {{- $resources := deepCopy $values.resources }}
        {{- if $values.gpu.count }}
        {{- $resources = mergeOverwrite $resources (dict "limits" (dict $values.gpu.resource $values.gpu.count)) }}
        {{- end }}
        {{- toYaml $resources | nindent 8 }}
      securityContext:
        {{- $security | nindent 8 }}
      volumeMounts:
        - name: tmp
          mountPath: /tmp
        - name: cache
          mountPath: /var/lib/outrider
        {{- if $root.Values.models.volume }}
        - name: models
          mountPath: /models
          readOnly: true
        {{- end }}
        {{- if $values.sharedMemory }}
        - name: shm
          mountPath: /dev/shm
        {{- end }}
        {{- include "outrider.identityMounts" $me | nindent 8 }}
        {{- with $values.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: tmp
      emptyDir: {}
    {{- if $values.cache.volume }}
    - name: cache
      {{- toYaml $values.cache.volume | nindent 6 }}
    {{- else if not $values.cache.persistent }}
    - name: cache
      emptyDir:
        sizeLimit: {{ $values.cache.size }}
    {{- end }}
    {{- with $root.Values.models.volume }}
    - name: models
      {{- toYaml . | nindent 6 }}
    {{- end }}
    {{- with $values.sharedMemory }}
    - name: shm
      emptyDir:
        medium: Memory
        sizeLimit: {{ . }}
    {{- end }}
    {{- include "outrider.identityVolumes" $me | nindent 4 }}
    {{- with $values.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}
