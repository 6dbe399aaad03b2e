#!/usr/bin/env python3
"""Train with several processes, be killed, and resume with another number of processes: a program to copy and adapt.

    torchrun --nproc-per-node 2 scripts/train_ddp.py demo-data/shards-zst/train --checkpoint run.pt

The dataset has images (``png`` or ``jpg``) and classes (``cls``), as scripts/demo packs them. Every few steps, the
program writes a checkpoint of the network, the optimizer and the loader's state, which is the same on every rank. If it
is started again, with any number of processes, it resumes from the checkpoint: no sample of the epoch is missed and
none comes twice.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import shardkit


def make_network(classes: int) -> nn.Module:
    """Return a small convolutional network for images of any size."""
    return nn.Sequential(
        *[nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4)],
        *[nn.Flatten(), nn.Linear(256, 64), nn.ReLU(), nn.Linear(64, classes)],
    )


def save_checkpoint(path: Path, checkpoint: dict[str, Any]) -> None:
    """Write a checkpoint atomically: a job may be killed at any moment."""
    temporary = path.with_name(f"{path.name}.new")
    torch.save(checkpoint, temporary)
    temporary.replace(path)


def train(options: argparse.Namespace, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train for the given number of epochs, or for the rest of them if an earlier run has left a checkpoint."""
    rank, world_size = distributed.get_rank(), distributed.get_world_size()
    dataset = shardkit.ShardDataset(options.dataset, fields={"image": "png;jpg", "label": "cls"})
    # Each rank gets its share, so that a step has about the same number of samples on any number of ranks.
    batch_size = max(1, options.batch_size // world_size)
    loader = shardkit.ShardLoader(dataset, batch_size, seed=options.seed, num_workers=options.num_workers)
    network = DistributedDataParallel(module)

    step = 0
    if options.checkpoint.exists():
        checkpoint = torch.load(options.checkpoint, weights_only=True)
        module.load_state_dict(checkpoint["network"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        loader.load_state_dict(checkpoint["loader"])
        step = checkpoint["step"]

    while loader.epoch < options.epochs:
        epoch = loader.epoch
        for batch in loader:
            step += 1
            if options.log_keys:  # before the ranks wait for each other, so that the lists cover every checkpoint
                with (options.log_keys / f"rank{rank}.txt").open("a") as file:
                    file.write("".join(f"{epoch}\t{step}\t{key}\n" for key in batch["__key__"]))
            loss = nn.functional.cross_entropy(network(batch["image"] / 255), batch["label"])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if step % options.checkpoint_every == 0 and rank == 0:
                print(f"epoch {epoch}, step {step}: loss {loss.item():.3f}", flush=True)
                state = {"network": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                save_checkpoint(options.checkpoint, {**state, "loader": loader.state_dict()})
    if rank == 0:
        state = {"network": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        save_checkpoint(options.checkpoint, {**state, "loader": loader.state_dict()})


def main() -> None:
    """Train as one of torchrun's processes, or alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset", help="a folder of shards with a manifest")
    parser.add_argument("--checkpoint", type=Path, required=True, help="file to write, and to resume from if it exists")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps between checkpoints (default: 10)")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="samples per step, over all processes (default: 64)")
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--num-workers", type=int, default=1, help="decoding threads of each process (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log-keys", type=Path, help="folder for lists of the samples that each process trained on")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)  # the same network on every rank
    network = make_network(options.classes)
    # Create the optimizer before the process group. Up to torch 2.13 at least, the first optimizer imports modules that
    # keep an existing process group alive for ever, and a gloo group's threads may abort the process when Python exits.
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    if "RANK" in os.environ:  # torchrun started it
        distributed.init_process_group("gloo")
    else:
        store = distributed.HashStore()  # type: ignore[attr-defined] # it is public, and has no stub
        distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        train(options, network, optimizer)
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
