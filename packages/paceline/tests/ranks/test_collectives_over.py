"""Collectives among the ranks that read different samples, where other ranks read the same."""

import torch

from paceline.testing import run_ranks


def test_peers_that_read_the_same_samples_are_left_out():
    def work():
        import torch.distributed as dist

        from paceline.world.collectives import Collectives
        from paceline.world.layout import Layout
        from paceline.world.mesh import Mesh
        from paceline.world.world import World

        rank = dist.get_rank()
        world = World(rank=rank, size=4, local_rank=rank, local_size=4, device="cpu")
        everyone = Collectives(world, device=torch.device("cpu"))
        mesh = Mesh(Layout(replicate=2, tp=2), world, "cpu")
        data = everyone.over(mesh.data_group)
        assert everyone.over(Mesh(Layout(replicate=4), world, "cpu").data_group) is everyone
        return data.size, data.gather(torch.tensor([rank])).tolist(), data.sum_ints([rank])

    want = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    assert run_ranks(work, world=4) == [(2, want[rank], [sum(want[rank])]) for rank in range(4)]


def test_another_group_of_the_same_size_is_not_taken_for_the_same():
    def work():
        import torch.distributed as dist

        from paceline.world.collectives import Collectives
        from paceline.world.layout import Layout
        from paceline.world.mesh import Mesh
        from paceline.world.world import World

        rank = dist.get_rank()
        world = World(rank=rank, size=4, local_rank=rank, local_size=4, device="cpu")
        mesh = Mesh(Layout(replicate=2, tp=2), world, "cpu")
        data = Collectives(world, device=torch.device("cpu")).over(mesh.data_group)
        assert data.over(mesh.data_group) is data
        return data.over(mesh.group("tp")).gather(torch.tensor([rank])).tolist()

    assert run_ranks(work, world=4) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def test_a_group_without_gloo_gets_one_beside_it_that_its_own_ranks_make():
    def work():
        import torch.distributed as dist

        from paceline.world import mesh as meshes
        from paceline.world.layout import Layout
        from paceline.world.world import World

        rank = dist.get_rank()
        world = World(rank=rank, size=4, local_rank=rank, local_size=4, device="cpu")
        group = meshes.Mesh(Layout(replicate=2, tp=2), world, "cpu").group("tp")
        assert meshes.cpu_group(group) is group
        meshes.backend_name = lambda group, device_type: ""  # as of a group that NCCL alone serves
        beside = meshes.cpu_group(group)
        assert beside is not group
        total = torch.tensor(rank)
        dist.all_reduce(total, group=beside)
        return int(total)

    assert run_ranks(work, world=4) == [1, 1, 5, 5]
