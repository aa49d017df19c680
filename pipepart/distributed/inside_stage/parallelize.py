"""Calls the user's function that parallelizes the layers of a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ...capture import Chain, RecordedChain
from ...profiling import Parallelize
from ...ranks import Ranks
from ...runtime.state.shared_parameters import SharedParameters
from .borders import wait_at_borders
from .recorded import ModelBefore
from .refusals import LayersBefore, check_functions
from .units import Unit

Units = dict[SharedParameters, list[Unit]]


def parallelize_layers(
    parallelize: Parallelize,
    chain: Chain,
    stages: Sequence[SharedParameters],
    mesh: DeviceMesh,
    foreign: Mapping[Tensor, Sequence[int]],
    ranks: Ranks,
    meet: Callable[[str, Callable[[], Units]], Units],
) -> Units:
    """Call the function of the user for the layers of a rank; return the FSDP units of each of its stages.

    All ranks call this, and wait for each other.

    Args:
        stages: of this rank.
        mesh: of the ranks that run them.
        foreign: parameters that several ranks use, with the ranks.
        meet: as :meth:`pipepart.distributed.call_sync.CallSync.meet`.

    Raises:
        ValueError: what it has done on this rank cannot run in a pipeline.
        Exception: what it raises on this rank; a RankError on the others.
    """
    layers = chain.modules_of(pair for shared in stages for pair in shared.originals)
    before, model = LayersBefore(layers, foreign), ModelBefore(chain.model)

    def checked() -> Units:
        units = before.checked_units(stages, mesh)
        units_here = {
            name: chain.groups[name]
            for shared in stages
            for name, _ in shared.originals
            if name in chain.groups
        }
        check_functions(chain.model, units_here, (unit for some in units.values() for unit in some))
        return units

    with ranks.adopting():
        parallelize(MappingProxyType(layers), mesh)
    units = meet("what parallelize has done", checked)
    if "tp" in (mesh.mesh_dim_names or ()):
        for shared in stages:
            wait_at_borders(shared.layers[0][1], shared.layers[-1][1])
    if isinstance(chain, RecordedChain):
        model.find_added()
        chain.around = model.without_added
    return units
