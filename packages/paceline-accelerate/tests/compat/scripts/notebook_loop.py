import torch
from torch import nn
from torch import optim
from torch.utils.data import Dataset, DataLoader
from accelerate import Accelerator
from torchmetrics.functional import accuracy
from tqdm import tqdm
from pathlib import Path

epochs = 5
batch_size = 100
in_features = 10
num_classes = 5
data_len = 10000

model = nn.Linear(in_features, num_classes)

optimizer = optim.AdamW(
    model.parameters(),
    lr=0.001,
    betas=(0.9, 0.999),
    weight_decay=1e-2,
)

lr_sche = optim.lr_scheduler.CosineAnnealingLR(
    optimizer, T_max=epochs, eta_min=0.001 * 100
)

loss_fn = nn.CrossEntropyLoss()

class Dataset(Dataset):
    def __init__(self) -> None:
        super().__init__()
        self.x = torch.randn(data_len, in_features)
        self.y = torch.randint(0, num_classes, (data_len,))

    def __getitem__(self, index):
        return self.x[index], self.y[index]

    def __len__(self):
        return len(self.x)

train_datalaoder = DataLoader(
    dataset=Dataset(),
    batch_size=batch_size,
    shuffle=True,
    num_workers=0,
    pin_memory=True,
)
val_datalaoder = DataLoader(
    dataset=Dataset(),
    batch_size=batch_size,
    shuffle=False,
    num_workers=0,
    pin_memory=True,
)

# Accelerator

output_dir = Path("accelerator_checkpoint")
output_dir

accelerator = Accelerator()

accelerator.device

# accelerator可以帮助获取state
accelerator.get_state_dict(model, unwrap=True)

model.state_dict()

print(accelerator.is_main_process)
print(accelerator.is_local_main_process)

model, optimizer, train_datalaoder, val_datalaoder = accelerator.prepare(
    model, optimizer, train_datalaoder, val_datalaoder
)

## clip gradients

accelerator.clip_grad_norm_(parameters=model.parameters(), max_norm=1, norm_type=2)
torch.nn.utils.clip_grad.clip_grad_norm_(
    parameters=model.parameters(), max_norm=1, norm_type=2
)

# accelerator.clip_grad_value_(parameters=model.parameters(), clip_value=0.1)
# torch.nn.utils.clip_grad.clip_grad_value_(parameters=model.parameters(), clip_value=0.1)

## train loop

for epoch in range(1, epochs + 1):
    # train
    model.train()
    with tqdm(
        total=len(train_datalaoder),
        desc=f"{epoch}/{epochs}",
        disable=not accelerator.is_main_process,
    ) as pbar:
        all_predictions = []
        all_targets = []
        all_losses = []
        for x, y in train_datalaoder:
            optimizer.zero_grad()
            with accelerator.autocast():
                y_pred: torch.Tensor = model(x)
                loss: torch.Tensor = loss_fn(y_pred, y)
            accelerator.backward(loss)  # replace loss.backward()
            accelerator.clip_grad_norm_(  # 梯度裁剪
                parameters=model.parameters(),
                max_norm=1.0,
                norm_type=2,
            )
            optimizer.step()

            pbar.set_postfix({"train/loss": f"{loss.item():.4f}"})
            pbar.update(1)

            # 获取所有数据上的预测值和真实值,用来验证
            all_pred, all_tar, all_loss = accelerator.gather_for_metrics(
                (y_pred, y, loss)
            )
            all_predictions.append(all_pred)
            all_targets.append(all_tar)
            all_losses.append(all_loss)

        train_acc = accuracy(
            preds=torch.cat(all_predictions, dim=0),
            target=torch.cat(all_targets, dim=0),
            task="multiclass",
            num_classes=num_classes,
        )
        train_avg_loss = torch.mean(torch.tensor(all_losses))
        pbar.set_postfix({"train/acc": f"{train_acc.item():.4f}"})

    lr_sche.step()

    # val
    model.eval()
    with tqdm(
        total=len(val_datalaoder),
        desc=f"{epoch}/{epochs}",
        disable=not accelerator.is_main_process,
    ) as pbar:
        all_predictions = []
        all_targets = []
        all_losses = []
        for x, y in val_datalaoder:
            with torch.inference_mode():
                y_pred: torch.Tensor = model(x)
            loss: torch.Tensor = loss_fn(y_pred, y)

            pbar.set_postfix({"val/loss": f"{loss.item():.4f}"})
            pbar.update(1)

            # 获取所有数据上的预测值和真实值,用来验证
            all_pred, all_tar, all_loss = accelerator.gather_for_metrics(
                (y_pred, y, loss)
            )
            all_predictions.append(all_pred)
            all_targets.append(all_tar)
            all_losses.append(all_loss)

        val_acc = accuracy(
            preds=torch.cat(all_predictions, dim=0),
            target=torch.cat(all_targets, dim=0),
            task="multiclass",
            num_classes=num_classes,
        )
        val_avg_loss = torch.mean(torch.tensor(all_losses))
        pbar.set_postfix({"val/acc": f"{val_acc.item():.4f}"})

    # 本地主进程才保存
    if accelerator.is_local_main_process:
        # like torch.distributed.barrier, wait for all processes to enter this call.
        accelerator.wait_for_everyone()
        unwrapped_model: nn.Module = accelerator.unwrap_model(model)
        # save
        accelerator.save(
            obj={
                "model": unwrapped_model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "lr_sche": lr_sche.state_dict(),
            },
            f=output_dir / "accelerator.last.pth",
        )
accelerator.print("training finish")

torch.load(output_dir / "accelerator.last.pth", map_location="cpu")

# 必须为dir
accelerator.save_state(output_dir=output_dir)

# 必须为dir
accelerator.load_state(input_dir=output_dir)

torch.load(output_dir / "pytorch_model.bin")

torch.load(output_dir / "optimizer.bin")
