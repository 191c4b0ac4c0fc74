"""OP-Fence: consecutive stages inside a cluster of fast lines (FusionLLM: Tang et al., 2024, section 4).

Louvain's method finds the clusters in the graph of bandwidths. The clusters are laid in a row, nearest next
to nearest, and the row is cut into stages of equal time to compute: so few boundaries cross slow lines.
"""

from __future__ import annotations

import networkx
import numpy as np

from swarm.plan.network import Job, Network

MAX_LINES = 16
"""Of a device in the graph: its fastest. 1024 devices would have half a million lines otherwise."""


def fence(network: Network, job: Job, *, seed: int = 0) -> np.ndarray:
    """[N] the stage of every device; memory is not looked at."""
    return cut_row(network, job, fenced_row(network, seed=seed))


def fenced_row(network: Network, *, seed: int = 0) -> np.ndarray:
    """[N] devices, cluster by cluster, and region by region inside a cluster."""
    clusters = clusters_of_regions(network, seed=seed)
    bandwidth_RR = network.bandwidth_bps
    members = [np.array(sorted(cluster)) for cluster in clusters]
    # The row starts at the cluster that is farthest from all others: an end of it, not its middle.
    near = np.array([[float(_finite(bandwidth_RR[np.ix_(a, b)]).mean()) for b in members] for a in members])
    np.fill_diagonal(near, 0.0)
    row, left = [int(near.sum(axis=1).argmin())], set(range(len(members)))
    left -= set(row)
    while left:
        row.append(min(left, key=lambda c: (-near[row[-1], c], c)))
        left.remove(row[-1])
    place_R = np.empty(len(network.regions), dtype=np.int64)
    place_R[np.concatenate([members[c] for c in row])] = np.arange(len(network.regions))
    return np.argsort(place_R[network.region_of()], kind="stable")


def clusters_of_regions(network: Network, *, seed: int = 0) -> list[set[int]]:
    """Louvain's communities of regions, weighted by bandwidth, in order of their first region."""
    size = len(network.regions)
    weight_RR = _finite(network.bandwidth_bps) / float(_finite(network.bandwidth_bps).max())
    graph = networkx.Graph()
    graph.add_nodes_from(range(size))
    for a in range(size):
        others = np.argsort(-weight_RR[a], kind="stable")[: MAX_LINES + 1]
        graph.add_weighted_edges_from((a, int(b), float(weight_RR[a, b])) for b in others if b != a)
    found = networkx.community.louvain_communities(graph, weight="weight", seed=seed)
    return sorted((set(cluster) for cluster in found), key=min)


def cut_row(network: Network, job: Job, row: np.ndarray) -> np.ndarray:
    """[N] stages: the row cut so that stages have speeds in proportion to their work, each with a device."""
    speed = np.array([network.devices[int(i)].flops_per_s for i in row])
    work = np.maximum(np.array(job.forward_flops), 1e-12)
    ends = np.cumsum(work) / work.sum()
    middle = (np.cumsum(speed) - speed / 2) / speed.sum()
    stage = np.minimum(np.searchsorted(ends, middle), job.stages - 1)
    # No stage may be empty, and the row stays in order: at least s after s devices, at most so many that one
    # is left for each stage to come.
    count = len(row)
    least = np.maximum(0, np.arange(count) - (count - job.stages))
    for i in range(count):
        before = stage[i - 1] if i else -1
        stage[i] = max(min(stage[i], before + 1), least[i], before, 0)
    of_N = np.empty(count, dtype=np.int64)
    of_N[row] = stage
    return of_N


def _finite(bandwidth_bps: np.ndarray) -> np.ndarray:
    """Lines of any speed count as a little faster than the fastest that has one."""
    finite = bandwidth_bps[np.isfinite(bandwidth_bps)]
    return np.minimum(bandwidth_bps, 2.0 * float(finite.max()) if len(finite) else 1.0)
