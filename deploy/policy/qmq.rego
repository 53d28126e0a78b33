# What must be true of QMQ in Kubernetes beyond what schemas and kube-score ask for. For conftest:
#   helm template qmq deploy/helm/qmq | conftest test --combine --policy deploy/policy -
package main

import rego.v1

objects := [each.contents | some each in input; each.contents.kind]

sets := [each | some each in objects; each.kind == "StatefulSet"]

workloads := [each | some each in objects; each.kind in {"StatefulSet", "Deployment"}]

name(object) := sprintf("%s %s", [object.kind, object.metadata.name])

covers(selector, labels) if {
	every key, value in selector {
		labels[key] == value
	}
}

budgets(workload) := [each |
	some each in objects
	each.kind == "PodDisruptionBudget"
	covers(each.spec.selector.matchLabels, workload.spec.template.metadata.labels)
]

deny contains sprintf("%s: nothing limits how many of its replicas are taken away at a time", [name(workload)]) if {
	some workload in workloads
	workload.spec.replicas > 1
	count(budgets(workload)) != 1
}

deny contains sprintf("%s: its budget lets more than one replica be taken away, and the group loses its majority", [name(set)]) if {
	some set in sets
	some budget in budgets(set)
	budget.spec.maxUnavailable != 1
}

deny contains sprintf("%s: a group has an odd number of replicas, because an even one survives no more losses", [name(set)]) if {
	some set in sets
	set.spec.replicas % 2 == 0
}

deny contains sprintf("%s: its volumes are deleted with it, and every message", [name(set)]) if {
	some set in sets
	some event in ["whenDeleted", "whenScaled"]
	object.get(set.spec, ["persistentVolumeClaimRetentionPolicy", event], "Delete") != "Retain"
}

deny contains sprintf("%s: a replica waits for the one before it, and a group without a master never elects one", [name(set)]) if {
	some set in sets
	set.spec.podManagementPolicy != "Parallel"
}

deny contains sprintf("%s: its replicas do not find each other before they are ready", [name(set)]) if {
	some set in sets
	not has_headless_service(set)
}

has_headless_service(set) if {
	some each in objects
	each.kind == "Service"
	each.metadata.name == set.spec.serviceName
	each.spec.clusterIP == "None"
	each.spec.publishNotReadyAddresses == true
	covers(each.spec.selector, set.spec.template.metadata.labels)
}

deny contains sprintf("%s: /data is no volume, and its messages end with the pod", [name(set)]) if {
	some set in sets
	some container in set.spec.template.spec.containers
	claims := {each.metadata.name | some each in set.spec.volumeClaimTemplates}
	count([mount | some mount in container.volumeMounts; mount.mountPath == "/data"; mount.name in claims]) == 0
}

deny contains sprintf("%s: less than 30 seconds are too few to hand over and to flush", [name(workload)]) if {
	some workload in workloads
	object.get(workload.spec.template.spec, "terminationGracePeriodSeconds", 0) < 30
}

deny contains sprintf("%s: %s loses its connections at SIGTERM, before others know that it ends: it needs a preStop", [name(workload), container.name]) if {
	some workload in workloads
	some container in workload.spec.template.spec.containers
	not container.lifecycle.preStop
}

deny contains sprintf("%s: %s may use more memory than it asked for, and is then killed when the node has none", [name(set), container.name]) if {
	some set in sets
	some container in set.spec.template.spec.containers
	container.resources.requests.memory != container.resources.limits.memory
}

deny contains sprintf("%s: liveness asks for readiness, so a replica without a master is restarted again and again", [name(workload)]) if {
	some workload in workloads
	some container in workload.spec.template.spec.containers
	container.livenessProbe.httpGet.path == "/readyz"
}

deny contains sprintf("%s: a probe starts a process", [name(workload)]) if {
	some workload in workloads
	some container in workload.spec.template.spec.containers
	some probe in ["startupProbe", "livenessProbe", "readinessProbe"]
	container[probe].exec
}

deny contains sprintf("%s: the image %s is another one tomorrow", [name(workload), container.image]) if {
	some workload in workloads
	some container in workload.spec.template.spec.containers
	not regex.match(`:[^:/]+$`, container.image)
}

deny contains sprintf("%s: the image %s is another one tomorrow", [name(workload), container.image]) if {
	some workload in workloads
	some container in workload.spec.template.spec.containers
	endswith(container.image, ":latest")
}

deny contains sprintf("%s: manifests have no secrets in them", [name(each)]) if {
	some each in objects
	each.kind == "Secret"
}
