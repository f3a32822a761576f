"""diffusers' training loop on a small UNet, with an exponential average of the weights."""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler
from diffusers.training_utils import EMAModel
from results import summary, write
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

folder, options = sys.argv[1], json.loads(sys.argv[2])
accelerator = Accelerator(
    cpu=True, gradient_accumulation_steps=2, project_config=ProjectConfiguration(project_dir=folder)
)
set_seed(4)
model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(8, 8),
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "UpBlock2D"),
)
average = EMAModel(model.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=model.config)
images = torch.randn(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
loader = DataLoader(TensorDataset(images), batch_size=4, shuffle=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=10)
noise_schedule = DDPMScheduler(num_train_timesteps=50)
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
losses = []
for _ in range(2):
    for (clean,) in loader:
        noise = torch.randn(clean.shape)
        times = torch.randint(0, 50, (clean.shape[0],))
        with accelerator.accumulate(model):
            predicted = model(noise_schedule.add_noise(clean, noise, times), times).sample
            loss = functional.mse_loss(predicted, noise)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.step(model.parameters())
        losses.append(accelerator.gather(loss.detach().repeat(4)).mean().item())
accelerator.save_state(f"{folder}/state")
weights = summary(accelerator.get_state_dict(model))
smooth = [value.double().norm().item() for value in average.shadow_params]
write(folder, losses=losses, weights=weights, average=smooth)
