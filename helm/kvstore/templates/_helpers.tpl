{{/* Names and labels. */}}
{{- define "kvstore.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "kvstore.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (include "kvstore.name" .) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "kvstore.name" .) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "kvstore.selector" -}}
app.kubernetes.io/name: {{ include "kvstore.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: daemon
{{- end -}}

{{- define "kvstore.labels" -}}
app.kubernetes.io/name: {{ include "kvstore.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvstore.image" -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}

{{- define "kvstore.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "kvstore.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "kvstore.service" -}}
{{- include "kvstore.fullname" . }}-peers
{{- end -}}

{{/* "yes" if daemons know each other, if they show certificates, if the API server is asked. */}}
{{- define "kvstore.shared" -}}
{{- if ne .Values.cluster.membership "none" -}}yes{{- end -}}
{{- end -}}

{{- define "kvstore.tls" -}}
{{- if and (include "kvstore.shared" .) (ne .Values.cluster.tls.source "none") -}}yes{{- end -}}
{{- end -}}

{{- define "kvstore.asks" -}}
{{- if eq .Values.cluster.membership "kubernetes" -}}yes{{- end -}}
{{- end -}}

{{/* Who may reach a port, as a network policy says it. */}}
{{- define "kvstore.callers" -}}
{{- range . }}
- namespaceSelector: {matchLabels: {{ default dict .namespaceLabels | toJson }}}
  {{- with .podLabels }}
  podSelector: {matchLabels: {{ toJson . }}}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Ports of KV events that others may reach: a JSON list of name and port. */}}
{{- define "kvstore.eventPorts" -}}
{{- $found := list -}}
{{- if .Values.networkPolicy.eventsFrom -}}
{{- range $name, $key := dict "events" "publish" "replay" "replay" -}}
{{- with dig "events" $key "" $.Values.config -}}
{{- $found = append $found (dict "name" $name "port" (regexFind "[0-9]+$" .)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toJson $found -}}
{{- end -}}

{{- define "kvstore.tlsSecret" -}}
{{- if eq .Values.cluster.tls.source "secret" -}}
{{- required "cluster.tls.source=secret: set cluster.tls.secretName to a Secret with tls.crt, tls.key and ca.crt" .Values.cluster.tls.secretName -}}
{{- else -}}
{{- include "kvstore.fullname" . }}-peer-tls
{{- end -}}
{{- end -}}

{{/* Refuse what could not work, or would be open by mistake. */}}
{{- define "kvstore.check" -}}
{{- $cluster := .Values.cluster -}}
{{- if include "kvstore.shared" . -}}
{{- if and (eq $cluster.tls.source "none") (not $cluster.insecure) -}}
{{- fail "cluster.tls.source=none lets everybody who reaches the peer port read what is stored: choose generated, secret or certManager, or say cluster.insecure=true" -}}
{{- end -}}
{{- if and (ne $cluster.tls.source "none") $cluster.insecure -}}
{{- fail "cluster.insecure=true and cluster.tls.source: leave one of them out" -}}
{{- end -}}
{{- if and (eq $cluster.tls.source "certManager") (not $cluster.tls.issuer.name) -}}
{{- fail "cluster.tls.source=certManager: set cluster.tls.issuer.name" -}}
{{- end -}}
{{- end -}}
{{- if and (eq $cluster.membership "etcd") (not $cluster.etcd.endpoints) -}}
{{- fail "cluster.membership=etcd: set cluster.etcd.endpoints; etcd is not part of this chart" -}}
{{- end -}}
{{- if and $cluster.etcd.clientCertificate (not $cluster.etcd.tlsSecretName) -}}
{{- fail "cluster.etcd.clientCertificate=true: set cluster.etcd.tlsSecretName" -}}
{{- end -}}
{{- if ne (empty $cluster.etcd.user) (empty $cluster.etcd.passwordSecretName) -}}
{{- fail "cluster.etcd.user and cluster.etcd.passwordSecretName go together: set both" -}}
{{- end -}}
{{- if and .Values.networkPolicy.eventsFrom (not (dig "events" "publish" "" .Values.config)) -}}
{{- fail "networkPolicy.eventsFrom: set config.events.publish=tcp://0.0.0.0:5567 and config.events.open=true" -}}
{{- end -}}
{{- if and .Values.rdma.enabled (include "kvstore.tls" .) (ne (dig "cluster" "bulk" "sealed" .Values.config) "clear") -}}
{{- fail "rdma.enabled=true: sealed records go by TCP; set config.cluster.bulk=clear" -}}
{{- end -}}
{{- if dig "pool" "url" "" .Values.config -}}
{{- $segment := include "kvstore.mib" (dig "pool" "segment" 0 .Values.config) -}}
{{- $buffer := include "kvstore.mib" (dig "pool" "buffer" "80MiB" .Values.config) -}}
{{- $needed := add $segment $buffer 512 -}}
{{- if gt $needed (include "kvstore.mib" .Values.memory.beside | int64) -}}
{{- fail (printf "memory.beside=%s has no room for config.pool.segment, config.pool.buffer and 512MiB: set memory.beside=%dMiB" .Values.memory.beside $needed) -}}
{{- end -}}
{{- end -}}
{{- $names := list -}}
{{- range .Values.disks -}}
{{- $names = append $names .name -}}
{{- end -}}
{{- if ne (len $names) (len (uniq $names)) -}}
{{- fail "disks: two of them have the same name" -}}
{{- end -}}
{{- end -}}

{{/* MiB of a size such as 1GiB, or of a number of bytes; what is left of one counts as one. */}}
{{- define "kvstore.mib" -}}
{{- $text := . -}}
{{- if not (kindIs "string" .) -}}{{- $text = printf "%d" (int64 .) -}}{{- end -}}
{{- $number := regexFind "^[0-9]+" $text | int64 -}}
{{- $unit := regexFind "[A-Za-z]*$" $text -}}
{{- $units := dict "" 1 "B" 1 "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776 -}}
{{- div (add (mul $number (get $units $unit)) 1048575) 1048576 -}}
{{- end -}}

{{- define "kvstore.memory" -}}
{{ add (include "kvstore.mib" .Values.config.dram.capacity) (include "kvstore.mib" .Values.memory.beside) }}Mi
{{- end -}}

{{/* Where a disk is mounted, and the directory of the file tier on it. Others' volumes have a lost+found. */}}
{{- define "kvstore.mountPath" -}}
/var/lib/kvstore/{{ .name }}
{{- end -}}

{{- define "kvstore.directory" -}}
{{- include "kvstore.mountPath" . }}{{ if not .hostPath }}/blocks{{ end }}
{{- end -}}

{{/* The volumes that hold sockets and blocks, and their mounts: for the daemon, and for the test. */}}
{{- define "kvstore.mounts" -}}
- name: sockets
  mountPath: /run/kvstore
{{- range .Values.disks }}
- name: disk-{{ .name }}
  mountPath: {{ include "kvstore.mountPath" . }}
  {{- if .claim }}
  subPathExpr: $(NODE_NAME)
  {{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.volumes" -}}
- name: sockets
  hostPath: {path: {{ .Values.sockets.hostPath | quote }}, type: DirectoryOrCreate}
{{- range .Values.disks }}
- name: disk-{{ .name }}
  {{- if .hostPath }}
  hostPath: {path: {{ .hostPath | quote }}, type: {{ ternary "Directory" "DirectoryOrCreate" (eq (toString .create) "false") }}}
  {{- else if .claim }}
  persistentVolumeClaim: {claimName: {{ .claim | quote }}}
  {{- else if $.testing }}
  emptyDir: {sizeLimit: 256Mi}
  {{- else }}
  ephemeral:
    volumeClaimTemplate:
      spec:
        accessModes: [{{ default "ReadWriteOnce" .ephemeral.accessMode }}]
        {{- with .ephemeral.storageClassName }}
        storageClassName: {{ . | quote }}
        {{- end }}
        resources: {requests: {storage: {{ .ephemeral.size | quote }}}}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "kvstore.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvstore.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
{{- end -}}

{{/* The daemon's settings. What depends on the pod is in its arguments. */}}
{{- define "kvstore.settings" -}}
{{- $all := deepCopy .Values.config -}}
{{- range $section := list "server" "file" "cluster" -}}
{{- if not (hasKey $all $section) -}}{{- $_ := set $all $section dict -}}{{- end -}}
{{- end -}}
{{- $any := ternary "[::]" "0.0.0.0" (eq .Values.ipFamily "IPv6") -}}
{{- $server := $all.server -}}
{{- $_ := set $server "socket" "/run/kvstore/kvstore.sock" -}}
{{- $_ := set $server "metrics_listen" (printf "%s:%d" $any (int .Values.metrics.port)) -}}
{{- $_ := set $server "metrics_open" true -}}
{{- $_ := set $server "page" false -}}
{{- $paths := list -}}
{{- range .Values.disks -}}{{- $paths = append $paths (include "kvstore.directory" .) -}}{{- end -}}
{{- $_ := set $all.file "path" (ternary $paths "" (not (empty $paths))) -}}
{{- $cluster := $all.cluster -}}
{{- $_ := set $cluster "membership" .Values.cluster.membership -}}
{{- if include "kvstore.shared" . -}}
{{- $_ := set $cluster "fleet" .Values.cluster.fleet -}}
{{- $_ := set $cluster "listen" (printf "%s:%d" $any (int .Values.cluster.port)) -}}
{{- if not $paths -}}{{- $_ := set $cluster "state" "/run/kvstore/state" -}}{{- end -}}
{{- if include "kvstore.tls" . -}}
{{- $_ := set $cluster "cert" "/etc/kvstore/peer-tls/tls.crt" -}}
{{- $_ := set $cluster "key" "/etc/kvstore/peer-tls/tls.key" -}}
{{- $_ := set $cluster "ca" "/etc/kvstore/peer-tls/ca.crt" -}}
{{- else -}}
{{- $_ := set $cluster "insecure" true -}}
{{- end -}}
{{- end -}}
{{- if eq .Values.cluster.membership "kubernetes" -}}
{{- $_ := set $cluster "kubernetes_service" (include "kvstore.service" .) -}}
{{- else if eq .Values.cluster.membership "etcd" -}}
{{- $etcd := .Values.cluster.etcd -}}
{{- $_ := set $cluster "etcd" $etcd.endpoints -}}
{{- if $etcd.tlsSecretName -}}{{- $_ := set $cluster "etcd_ca" "/etc/kvstore/etcd-tls/ca.crt" -}}{{- end -}}
{{- if $etcd.clientCertificate -}}
{{- $_ := set $cluster "etcd_cert" "/etc/kvstore/etcd-tls/tls.crt" -}}
{{- $_ := set $cluster "etcd_key" "/etc/kvstore/etcd-tls/tls.key" -}}
{{- end -}}
{{- if $etcd.user -}}
{{- $_ := set $cluster "etcd_user" $etcd.user -}}
{{- $_ := set $cluster "etcd_password_file" "/etc/kvstore/etcd-password/password" -}}
{{- end -}}
{{- end -}}
{{- range $section := keys $all | sortAlpha }}
[{{ $section }}]
{{- $values := get $all $section }}
{{- range $key := keys $values | sortAlpha }}
{{ $key }} = {{ get $values $key | toJson }}
{{- end }}
{{ end -}}
{{- end -}}
