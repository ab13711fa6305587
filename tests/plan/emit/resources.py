"""Custom resources of Kubernetes, written down from their definitions: keys, types, what must be there; and what breaks them.

A schema has the words of the definitions' own OpenAPI schemas. An object with `properties` has no other keys: the API
server drops those, or refuses them where validation is strict, as kubectl asks for.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

STRING: Schema = {"type": "string"}
INTEGER: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
BOOLEAN: Schema = {"type": "boolean"}
OBJECT: Schema = {"type": "object"}  # with any keys
STRINGS: Schema = {"type": "object", "additionalProperties": STRING}

TYPES = {"string": str, "integer": int, "boolean": bool, "object": dict, "array": list}


def objects(properties: Mapping[str, Schema], *required: str) -> Schema:
    """The schema of objects with these keys at most."""
    return {"type": "object", "properties": properties, "required": required}


def lists(items: Schema) -> Schema:
    """The schema of lists."""
    return {"type": "array", "items": items}


def violations(value: Any, schema: Schema, where: str = "") -> list[str]:
    """What of a resource its definition does not take."""
    return list(_violations(value, schema, where or "resource"))


def _violations(value: Any, schema: Schema, where: str) -> Iterator[str]:
    kind = TYPES[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        yield f"{where}: {value!r} is no {schema['type']}"
    elif isinstance(value, dict):
        yield from _violations_of_object(value, schema, where)
    elif isinstance(value, list):
        for number, one in enumerate(value):
            yield from _violations(one, schema["items"], f"{where}[{number}]")
    elif isinstance(value, str):
        is_known = value in schema.get("enum", [value]) and re.fullmatch(schema.get("pattern", "(?s).*"), value)
        if not is_known or len(value) > schema.get("maxLength", len(value)):
            yield f"{where}: {value!r}"
    elif value < schema.get("minimum", value):
        yield f"{where}: {value}"


def _violations_of_object(value: Mapping[str, Any], schema: Schema, where: str) -> Iterator[str]:
    properties, others = schema.get("properties", {}), schema.get("additionalProperties")
    takes_any = "properties" not in schema and others is None
    yield from (f"{where}: {name} missing" for name in schema.get("required", ()) if name not in value)
    for name, one in value.items():
        expected = properties.get(name, others)
        if expected is not None:
            yield from _violations(one, expected, f"{where}.{name}")
        elif not takes_any:
            yield f"{where}: unknown {name}"


def custom_resource(api_version: str, kind: str, name: Schema, spec: Schema) -> Schema:
    """The schema of a whole resource."""
    metadata = objects({"name": name, "labels": STRINGS, "annotations": STRINGS}, "name")
    return objects(
        {
            "apiVersion": {"type": "string", "enum": [api_version]},
            "kind": {"type": "string", "enum": [kind]},
            "metadata": metadata,
            "spec": spec,
        },
        *("apiVersion", "kind", "metadata", "spec"),
    )


# Kubernetes 1.37, core/v1; a slow test has its own schemas read the same pods
QUANTITIES = STRINGS
RESOURCES = objects({"requests": QUANTITIES, "limits": QUANTITIES, "claims": lists(OBJECT)})
CONTAINER_KEYS = {
    **dict.fromkeys(("name", "image", "workingDir", "imagePullPolicy"), STRING),
    **dict.fromkeys(("command", "args"), lists(STRING)),
    **dict.fromkeys(("env", "envFrom", "volumeMounts"), lists(OBJECT)),
    **dict.fromkeys(("livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "securityContext"), OBJECT),
    "ports": lists(objects({"name": STRING, "containerPort": INTEGER, "protocol": STRING}, "containerPort")),
    "resources": RESOURCES,
}
CONTAINER = objects(CONTAINER_KEYS, "name")
POD_KEYS = {
    "containers": lists(CONTAINER),
    **dict.fromkeys(("initContainers", "volumes", "tolerations", "imagePullSecrets"), lists(OBJECT)),
    **dict.fromkeys(("nodeSelector", "affinity", "securityContext"), OBJECT),
    **dict.fromkeys(("serviceAccountName", "priorityClassName", "restartPolicy"), STRING),
    "terminationGracePeriodSeconds": INTEGER,
}
POD_TEMPLATE = objects({"metadata": OBJECT, "spec": objects(POD_KEYS, "containers")})

# KubeRay 1.7.0 of 2026-08-20: version v1 in ray-operator/config/crd/bases/ray.io_rayservices.yaml; and in its
# controllers/ray/utils/validation.go: the length of the name, minReplicas and maxReplicas, one container at least
RAY_GROUP_KEYS = {
    "rayStartParams": STRINGS,
    "template": POD_TEMPLATE,
    "resources": STRINGS,
    "labels": STRINGS,
}
RAY_CLUSTER = objects(
    {
        "headGroupSpec": objects(
            RAY_GROUP_KEYS
            | {
                "enableIngress": BOOLEAN,
                "headService": OBJECT,
                "ingressOptions": OBJECT,
                "serviceType": STRING,
            },
            "template",
        ),
        "workerGroupSpecs": lists(
            objects(
                RAY_GROUP_KEYS
                | dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), COUNT)
                | dict.fromkeys(("idleTimeoutSeconds", "numOfHosts", "priority"), INTEGER)
                | {"groupName": STRING, "scaleStrategy": OBJECT, "suspend": BOOLEAN},
                *("groupName", "maxReplicas", "minReplicas", "template"),
            )
        ),
        **dict.fromkeys(("rayVersion", "managedBy"), STRING),
        **dict.fromkeys(("enableInTreeAutoscaling", "suspend"), BOOLEAN),
        **dict.fromkeys(
            (
                *("authOptions", "autoscalerOptions", "gcsFaultToleranceOptions", "headServiceAnnotations"),
                *("historyServerOptions", "networkPolicy", "tlsOptions", "upgradeStrategy"),
            ),
            OBJECT,
        ),
    },
    "headGroupSpec",
)
RAY_SERVICE = custom_resource(
    "ray.io/v1",
    "RayService",
    {"type": "string", "pattern": "[a-z]([-a-z0-9]*[a-z0-9])?", "maxLength": 47},
    objects(
        {
            "serveConfigV2": STRING,
            "rayClusterConfig": RAY_CLUSTER,
            **dict.fromkeys(("excludeHeadPodFromServeSvc", "suspend"), BOOLEAN),
            **dict.fromkeys(("serveService", "upgradeStrategy"), OBJECT),
            **dict.fromkeys(
                (
                    *("rayClusterDeletionDelaySeconds", "deploymentUnhealthySecondThreshold"),
                    "serviceUnhealthySecondThreshold",
                ),
                INTEGER,
            ),
            "managedBy": {"type": "string", "enum": ["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"]},
        },
        "rayClusterConfig",
    ),
)

# ai-dynamo/dynamo, deploy/operator/api, read 2026-11: v1beta1/dynamographdeployment_types.go (0fddc01b),
# v1beta1/dynamocomponentdeployment_types.go (006b6e10), v1beta1/common.go (02911c80)
LABEL: Schema = {"type": "string", "pattern": "[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?", "maxLength": 63}
FRAMEWORK: Schema = {"type": "string", "enum": ["sglang", "vllm", "trtllm"]}
DYNAMO_COMPONENT = objects(
    {
        "name": LABEL,
        "type": {"type": "string", "enum": ["frontend", "worker", "prefill", "decode", "planner", "epp"]},
        "podTemplate": POD_TEMPLATE,
        "replicas": COUNT,
        "scalingAdapter": objects({}),
        "multinode": objects({"nodeCount": INTEGER}),
        "modelRef": objects({"name": STRING, "revision": STRING}, "name"),
        "compilationCache": objects({"pvcName": STRING, "mountPath": STRING}, "pvcName"),
        **dict.fromkeys(("sharedMemorySize", "frontendSidecar"), STRING),
        **dict.fromkeys(("eppConfig", "topologyConstraint", "experimental"), OBJECT),
        "globalDynamoNamespace": BOOLEAN,
        "minAvailable": INTEGER,
    },
    "name",
)
DYNAMO_GRAPH_V1BETA1 = custom_resource(
    "nvidia.com/v1beta1",
    "DynamoGraphDeployment",
    LABEL,
    objects(
        {
            "components": lists(DYNAMO_COMPONENT),
            "backendFramework": FRAMEWORK,
            "env": lists(OBJECT),
            **dict.fromkeys(("annotations", "labels"), STRINGS),
            "priorityClassName": STRING,
            **dict.fromkeys(("topologyConstraint", "experimental"), OBJECT),
        }
    ),
)

# the same repository: v1alpha1/dynamocomponentdeployment_types.go (00686d64)
DYNAMO_SERVICE = objects(
    {
        **dict.fromkeys(
            ("serviceName", "componentType", "subComponentType", "dynamoNamespace", "envFromSecret"), STRING
        ),
        **dict.fromkeys(("annotations", "labels"), STRINGS),
        "globalDynamoNamespace": BOOLEAN,
        "resources": objects(dict.fromkeys(("requests", "limits"), OBJECT) | {"claims": lists(OBJECT)}),
        **dict.fromkeys(("envs", "volumeMounts"), lists(OBJECT)),
        **dict.fromkeys(
            (
                *("ingress", "modelRef", "sharedMemory", "extraPodMetadata", "livenessProbe", "readinessProbe"),
                *("multinode", "eppConfig", "checkpoint"),
            ),
            OBJECT,
        ),
        "extraPodSpec": objects(POD_KEYS | {"mainContainer": objects(CONTAINER_KEYS)}),
        "replicas": COUNT,
        "scalingAdapter": objects({"enabled": BOOLEAN}),
    }
)
DYNAMO_GRAPH_V1ALPHA1 = custom_resource(
    "nvidia.com/v1alpha1",
    "DynamoGraphDeployment",
    LABEL,
    objects(
        {
            "services": {"type": "object", "additionalProperties": DYNAMO_SERVICE},
            "backendFramework": FRAMEWORK,
            "envs": lists(OBJECT),
            **dict.fromkeys(("annotations", "labels"), STRINGS),
        }
    ),
)
