import argparse

import torch
from torch.utils.data import DataLoader

import deepspeed
from deepspeed.ops.adam import FusedAdam  # imported, not used


class Lines(torch.utils.data.Dataset):
    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.x = torch.randn(64, 8, generator=generator)
        self.y = (self.x[:, 0] > 0).long()

    def __len__(self):
        return len(self.x)

    def __getitem__(self, idx):
        return {"x": self.x[idx], "labels": self.y[idx]}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh())
        self.head = torch.nn.Linear(16, 2)

    def forward(self, x, labels):
        return torch.nn.functional.cross_entropy(self.head(self.body(x)), labels)


parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--save_dir", default="saved")
parser = deepspeed.add_config_arguments(parser)
args = parser.parse_args()

torch.manual_seed(0)
deepspeed.init_distributed(
dist_backend='hccl', # 使用NCCL后端(GPU场景)
)
model = Model()
parameters = filter(lambda x:x.requires_grad,model.parameters())
model_engine, optimizer, _, scheduler = deepspeed.initialize(
    args=args,
    model=model,
    model_parameters=parameters
)
dataset = Lines()
sampler = torch.utils.data.distributed.DistributedSampler(dataset)
data_loader = DataLoader(dataset, batch_size=model_engine.train_micro_batch_size_per_gpu(), sampler=sampler)

_, client_sd = model_engine.load_checkpoint(args.save_dir, None)
step = client_sd["step"] if client_sd else 0
shown = False
for epoch in range(4):
    sampler.set_epoch(epoch)
    total = 0.0
    for batch in data_loader:
        batch = {key: value.to(model_engine.device) for key, value in batch.items()}
        loss = model_engine.train(**batch)
        if not shown and model_engine.global_rank == 0:
            print(f"from step {step}, loss {loss.item()}", flush=True)
            shown = True
        model_engine.backward(loss)
        model_engine.step()
        if model_engine.was_step_applied():
            step += 1
        total += loss.item()
    if model_engine.global_rank == 0 and epoch in (0, 3):
        print(f"epoch loss {total / len(data_loader)}", flush=True)
client_sd = {"step": step, "epoch": epoch}
model_engine.save_checkpoint(args.save_dir, ckpt_id=step, client_sd=client_sd)
