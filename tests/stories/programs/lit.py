"""A LightningModule with a bar, validation and checkpoints; the faults are those of hooks."""

import os
import time
import warnings
from datetime import timedelta

import lightning as L
import torch
import torch.nn.functional as F
import witness
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from witness import STYLE, TIMEOUT, everywhere, fault, inject, note

if STYLE == "quiet":
    warnings.filterwarnings("ignore")


class Series(torch.utils.data.Dataset):
    """Windows of a time series; each knows the name of its sensor."""

    def __init__(self, size, training):
        self.size, self.training, self.asked = size, training, 0

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.asked += 1
        sample = {"sensor": f"s{index:04d}", "x": torch.randn(12), "y": torch.randn(1)}
        if self.training and self.asked == 30:
            if fault("no_target"):
                inject()
                del sample["y"]
            if fault("s3_stuck"):
                inject(end="hung")
                self.fetch()
        return sample

    def fetch(self):
        time.sleep(TIMEOUT * 5)


class Forecast(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(12, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))

    def training_step(self, batch, index):
        note(phase="train", step=self.global_step)
        if fault("sigkill") and self.global_step == 18:
            inject(end="killed", error="SIGKILL")
            os.kill(os.getpid(), 9)
        if fault("bad_scale") and self.global_step == 18:
            inject()
            batch["y"] = self.rescale(batch["y"])
        loss = F.mse_loss(self.net(batch["x"]), batch["y"])
        if everywhere("nan") and self.global_step >= 14:
            note(injected=True)
            loss = loss * float("nan")
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def rescale(self, y):
        mean, deviation = {"s0001": (0.0, 1.0)}.get("s9999", (None, None))
        return (y - mean) / deviation

    def validation_step(self, batch, index):
        note(phase="evaluate")
        loss = F.mse_loss(self.net(batch["x"]), batch["y"])
        values = {"val_loss": loss}
        if fault("log_keys") and self.current_epoch == 1 and not self.trainer.sanity_checking:
            inject()
            values["val_outliers"] = loss * 0
        self.log_dict(values, sync_dist=True, prog_bar=True)

    def on_validation_epoch_end(self):
        if everywhere("gather_global_zero") and self.trainer.is_global_zero and self.current_epoch == 1:
            note(injected=True)
            self.worst_sensors()

    def worst_sensors(self):
        return self.all_gather(torch.ones(3))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Report(Callback):
    def on_train_epoch_end(self, trainer, module):
        if fault("plots_slow", 0) and trainer.current_epoch == 1:
            inject()
            for page in range(30):
                print(f"report: page {page + 1} of 30 rendered", flush=True)
                time.sleep(TIMEOUT / 11)
        if everywhere("plots_quick") and trainer.is_global_zero:
            for page in range(5):
                print(f"report: page {page + 1} of 5 rendered", flush=True)
                time.sleep(0.3)


def main():
    note(phase="load")
    strategy = DDPStrategy(process_group_backend="gloo", timeout=timedelta(seconds=TIMEOUT))
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ["STORY_WORLD"]),
        strategy=strategy,
        max_epochs=3,
        log_every_n_steps=2,
        logger=False,
        callbacks=[Report(), ModelCheckpoint(dirpath="checkpoints", monitor="val_loss")],
    )
    loaders = [
        torch.utils.data.DataLoader(Series(size, training), batch_size=4)
        for size, training in ((128, True), (24, False))
    ]
    trainer.fit(Forecast(), *loaders)
    note(phase="teardown")
    if trainer.is_global_zero:
        print(f"best model: {trainer.checkpoint_callback.best_model_path}")


if __name__ == "__main__":
    with witness.watching():
        main()
