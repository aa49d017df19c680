"""Runs the joint search alone, without the planner around it."""

from pipepart import Cluster, Plan, Profile
from pipepart.planning.costs.layer_ranges import ChainCosts
from pipepart.planning.joint.request import JointRequest
from pipepart.planning.joint.search import search_jointly
from pipepart.planning.partition.replica_groups import group_devices
from pipepart.planning.plans.options import PlanOptions
from pipepart.planning.request import read_request
from schedules.searching.allowance import Allowance


def joint_request(profile: Profile, cluster: Cluster, replicas: int = 1, **options) -> JointRequest:
    """What `plan` with these options would let the joint search choose from."""
    read = read_request(profile, cluster, PlanOptions(**options))
    limits = read.constraints
    return JointRequest(
        profile,
        group_devices(cluster, replicas),
        ChainCosts(profile, profile.costs[0], limits.colocate, limits.no_border),
        limits,
        read.asked,
        profile.fingerprint,
        stages=read.stages if isinstance(read.stages, int) else None,
    )


def found_for(
    profile: Profile, cluster: Cluster, operations: int = 100_000, replicas: int = 1, **options
) -> Plan | None:
    """The plan of the joint search, with no plan to start from."""
    request = joint_request(profile, cluster, replicas, **options)
    return search_jointly(request, [], Allowance(operations))
