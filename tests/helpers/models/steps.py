"""Steps that do more than a forward pass and a loss: hooks, buffers, second nets, noise, two optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from tests.helpers.models.bases import Base, Classifier, Regression
from tests.helpers.models.case import Case
from tests.helpers.models.data import text, vectors
from tests.helpers.models.dense import deep_mlp, plain_mlp, smooth_mlp


class Hooked(Classifier):
    """A forward hook keeps the hidden activation; the loss reads it, and a buffer follows its mean."""

    def __init__(self) -> None:
        super().__init__(plain_mlp())
        self.register_buffer("running", torch.zeros(32))
        self.kept: list[Tensor] = []
        self.net[1].register_forward_hook(lambda module, args, output: self.kept.append(output))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        (hidden,) = self.kept
        self.kept.clear()
        self.running.lerp_(hidden.detach().mean(0), 0.1)
        self.log("dead", (hidden == 0).float().mean().item(), sync_dist=False)
        return loss + 0.1 * hidden.pow(2).mean() + hidden.norm(dim=-1).mean() * 0.01

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.kept.clear()

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        predicted = super().predict_step(batch, batch_idx)
        return {**predicted, "hidden": self.kept.pop()}


class L2(Regression):
    """Reads every parameter in the loss."""

    def loss(self, batch: Any) -> Tensor:
        penalty = sum(p.pow(2).sum() for p in self.parameters())
        sparsity = self.net[0].weight.abs().mean() + self.net[2].weight.norm()
        return super().loss(batch) + 0.01 * penalty + 0.01 * sparsity


class ClampedWeights(Regression):
    """Changes its weights between steps, under no_grad."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for p in self.parameters():
                p.clamp_(-0.2, 0.2)


class TargetNetwork(Regression):
    """A slow copy of the net follows it, as in BYOL or DQN."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.target = copy.deepcopy(net).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            wanted = y + 0.9 * self.target(x + 0.1)
        return F.smooth_l1_loss(self(x), wanted)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for slow, fast in zip(self.target.parameters(), self.net.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)


class Statistics(Regression):
    """Keeps statistics in buffers, of the batch and of activations, in place and anew, and logs of both."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("smallest", torch.full((12,), 9.0))
        self.register_buffer("mean", torch.zeros(12))
        self.register_buffer("hidden", torch.zeros(24))
        self.register_buffer("output", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.net[1:](self.net[0](x - self.mean))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps += 1
        self.smallest.clamp_(max=x.amin(0))
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        h = self.net[0](x - self.mean)
        self.hidden.mul_(0.9).add_(0.1 * h.detach().mean(0))
        output = self.net[1:](h)
        self.output[batch_idx % 2].copy_(output.detach().mean(0))
        loss = F.mse_loss(output, y)
        self.log("train_loss", loss, sync_dist=True)
        self.log_dict({"positive": (x > 0).sum().to(x.dtype), "shift": self.mean.norm(), "three": torch.tensor(3.0)})
        return loss


class GradientPenalty(Regression):
    """The loss holds a gradient with respect to the input, hence a double backward."""

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self(x).sum(), x, create_graph=True)
        return super().loss((x, y)) + 0.1 * (slope.norm(dim=1) - 1).pow(2).mean()


class Recommender(Base):
    """Matrix factorisation: two embeddings and their biases."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(48, 16), nn.Embedding(48, 16)
        self.user_bias, self.item_bias = nn.Embedding(48, 1), nn.Embedding(48, 1)

    def forward(self, users: Tensor, items: Tensor) -> Tensor:
        scores = (self.users(users) * self.items(items)).sum(-1)
        return scores + self.user_bias(users).squeeze(-1) + self.item_bias(items)[..., 0]

    def loss(self, batch: Any) -> Tensor:
        users, items = batch
        against = self(users, items.roll(1, 0))
        return -F.logsigmoid(self(users, items) - against).mean() + 1e-3 * self.users.weight.square().sum()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(*batch)


class BuiltLate(Classifier):
    """Makes its layers in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        self.net: nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = plain_mlp()


class VAE(Base):
    """Draws noise in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 8))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 12))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        z = mean + torch.randn_like(mean) * (log_variance / 2).exp() if self.training else mean
        return self.decoder(z), mean, log_variance

    def loss(self, batch: Any) -> Tensor:
        x, _ = batch
        again, mean, log_variance = self(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(1).mean()
        return F.binary_cross_entropy_with_logits(again, x.sigmoid()) + 0.1 * divergence


class Contrastive(Base):
    """Two towers, every sample of the batch a negative of the others."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Sequential(nn.Linear(12, 32), nn.ReLU(), nn.Linear(32, 16))
        self.right = nn.Sequential(nn.Linear(3, 32), nn.ReLU(), nn.Linear(32, 16))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(self.left(x), dim=-1)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        logits = self(x) @ F.normalize(self.right(y), dim=-1).t() * self.scale.exp()
        labels = torch.arange(len(x), device=x.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


class GAN(LightningModule):
    """Manual optimization, two optimizers with a schedule each."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(6, 32), nn.LeakyReLU(0.2), nn.Linear(32, 12))
        self.discriminator = nn.Sequential(nn.Linear(12, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, _ = batch
        ones, zeros = torch.ones(len(real), 1).type_as(real), torch.zeros(len(real), 1).type_as(real)
        generator, discriminator = self.optimizers()
        z = torch.randn(len(real), 6).type_as(real)

        self.toggle_optimizer(generator)
        g_loss = F.binary_cross_entropy_with_logits(self.discriminator(self(z)), ones)
        generator.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(generator, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
        generator.step()
        self.untoggle_optimizer(generator)

        self.toggle_optimizer(discriminator)
        fake = self(z).detach()
        d_loss = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(self.discriminator(fake), zeros)
        discriminator.zero_grad()
        self.manual_backward(d_loss)
        discriminator.step()
        self.untoggle_optimizer(discriminator)
        for scheduler in self.lr_schedulers():
            scheduler.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, on_step=True, on_epoch=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_score", self.discriminator(batch[0]).mean())

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0][:, :6])

    def configure_optimizers(self) -> Any:
        nets = (self.generator, self.discriminator)
        optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2) for net in nets]
        return optimizers, [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9) for optimizer in optimizers]


def regression(make: Callable[[], nn.Module], kind: type[Regression] = Regression) -> Case:
    return Case(lambda: kind(make()), vectors(classes=0))


ROWS: dict[str, Case] = {
    "mlp_deep": regression(deep_mlp),
    "mlp_l2": regression(deep_mlp, L2),
    "mlp_clamped": Case(lambda: ClampedWeights(deep_mlp()), vectors(classes=0), couples=True),
    "mlp_target_network": Case(lambda: TargetNetwork(deep_mlp()), vectors(classes=0), couples=True),
    "mlp_statistics": Case(lambda: Statistics(deep_mlp()), vectors(classes=0), couples=True),
    "mlp_gradient_penalty": Case(lambda: GradientPenalty(smooth_mlp()), vectors(classes=0)),
    "recommender": Case(Recommender, text()),
    "mlp_hooked": Case(Hooked, vectors(), couples=True),
    "mlp_built_late": Case(BuiltLate, vectors()),
    "vae": Case(VAE, vectors(), couples=True),
    "contrastive": Case(Contrastive, vectors(classes=0)),
    "gan": Case(GAN, vectors(), couples=True, manual=True),
}
