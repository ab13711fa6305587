"""A deployment plan for the tests of all that reads one."""

from forerun.plan.deployment_plan import DeploymentPlan, Layout, PlannedEngine
from forerun.plan.load import Load
from forerun.plan.sla import Sla

PLAIN_PLAN = DeploymentPlan(
    model="org/Some_Model-1B",
    profile={"machine": "a machine, 4 cores"},
    load=Load(rate=20, isl=3000, osl=300),
    sla=Sla(ttft=0.5, tpot=0.05),
    feasible=True,
    best_achievable=None,
    layout=Layout.AGGREGATED,
    replicas=3,
    prefill_replicas=0,
    decode_replicas=0,
    engine=PlannedEngine(
        max_num_seqs=32, max_num_batched_tokens=2048, max_model_len=4096, block_size=16, dtype="bfloat16"
    ),
)
"""Three engines that decode without drafts."""
