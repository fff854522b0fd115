"""The shape of a transformer, and what follows from it: parameters and FLOPs."""

from __future__ import annotations

import msgspec

from shoal.plan.hardware import Impossible, at_least, at_most

LAYERS_MAX = 10_000
SIZE_MAX = 10_000_000  # hidden size, vocabulary, feed-forward size
SEQUENCE_MAX = 100_000_000
EXPERTS_MAX = 100_000


class Model(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer. A zero means "the usual": see the properties below."""

    name: str = "model"
    layers: int
    hidden: int
    heads: int
    kv_heads: int = 0  # 0: as many as heads
    head: int = 0  # size of one head; 0: hidden / heads
    ffn: int = 0  # 0: four times hidden
    vocab: int = 51_200
    sequence: int = 2048
    gated_ffn: bool = False  # SwiGLU and the like: three matrices instead of two
    tied: bool = True  # input and output embeddings are one matrix
    biases: bool = True  # in the linear layers
    norm_biases: bool = True  # LayerNorm has them, RMSNorm does not
    embedding_norm: bool = False
    positions: int = 0  # rows of a learned position embedding
    parallel: bool = False  # attention and feed-forward side by side, as in PaLM
    experts: int = 0  # 0: a dense model
    experts_active: int = 0  # experts that see each token, without the shared ones
    shared_experts: int = 0
    expert_ffn: int = 0  # 0: as ffn
    dense_layers: int = 0  # first layers without experts
    expert_nodes: int = 0  # a token visits at most this many nodes; 0: no limit
    query_rank: int = 0  # multi-head latent attention, as in DeepSeek: 0 for none
    kv_rank: int = 0
    rope_head: int = 0
    parameters_published: float = 0.0  # as its authors count them
    source: str = ""

    # -- what a zero stands for

    @property
    def kv(self) -> int:
        return self.kv_heads or self.heads

    @property
    def head_size(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def ffn_size(self) -> int:
        return self.ffn or 4 * self.hidden

    @property
    def expert_size(self) -> int:
        return self.expert_ffn or self.ffn_size

    @property
    def expert_layers(self) -> int:
        return self.layers - self.dense_layers if self.experts else 0

    @property
    def attention_width(self) -> int:
        """All heads of a token side by side."""
        return self.heads * self.head_size

    @property
    def kv_width(self) -> int:
        """Keys, or values, of a token in one layer."""
        return self.kv * self.head_size

    # -- parameters

    def attention_weights(self) -> int:
        """Of one layer, matrices only."""
        hidden, heads, size = self.hidden, self.heads, self.head_size
        if self.kv_rank:
            query = (hidden + heads * (size + self.rope_head)) * self.query_rank
            if not self.query_rank:
                query = hidden * heads * (size + self.rope_head)
            keys = hidden * (self.kv_rank + self.rope_head) + self.kv_rank * heads * 2 * size
            return query + keys + heads * size * hidden
        return 2 * hidden * self.attention_width + 2 * hidden * self.kv_width

    def ffn_weights(self, size: int) -> int:
        return (3 if self.gated_ffn else 2) * self.hidden * size

    def expert_weights(self) -> int:
        """One expert of one layer."""
        return self.ffn_weights(self.expert_size)

    def _small(self) -> int:
        """Norms and biases of one layer without experts."""
        norms = (1 if self.parallel else 2) * self.hidden * (2 if self.norm_biases else 1)
        if self.kv_rank:
            norms += self.query_rank + self.kv_rank
        if not self.biases:
            return norms
        attention = self.attention_width + 2 * self.kv_width + self.hidden
        return norms + attention + self.ffn_size * (2 if self.gated_ffn else 1) + self.hidden

    def embedding_parameters(self) -> int:
        """Of the input: words and positions."""
        norm = self.hidden * (2 if self.norm_biases else 1) if self.embedding_norm else 0
        return (self.vocab + self.positions) * self.hidden + norm

    def output_parameters(self) -> int:
        """The last norm, and the output matrix where it is one of its own."""
        norm = self.hidden * (2 if self.norm_biases else 1)
        return norm + (0 if self.tied else self.vocab * self.hidden)

    def layer_parameters(self) -> int:
        """One layer without its experts; with its router, its shared experts or its dense FFN."""
        return self.attention_weights() + self._small() + self.ffn_weights(self.ffn_size)

    def expert_layer_parameters(self) -> int:
        """One layer that has experts, without the routed experts themselves."""
        router = self.hidden * self.experts
        return (
            self.attention_weights()
            + self._small()
            + router
            + self.shared_experts * self.expert_weights()
        )

    def parameters(self) -> int:
        dense = (self.layers - self.expert_layers) * self.layer_parameters()
        sparse = self.expert_layers * (
            self.expert_layer_parameters() + self.experts * self.expert_weights()
        )
        return dense + sparse + self.embedding_parameters() + self.output_parameters()

    def active_parameters(self) -> int:
        """Those that one token passes through."""
        idle = self.experts - self.experts_active
        return self.parameters() - self.expert_layers * idle * self.expert_weights()

    # -- floating-point operations

    def matmul_weights(self) -> int:
        """Weights that a token is multiplied with: active, with the output, without lookups."""
        dense = self.attention_weights() + self.ffn_weights(self.ffn_size)
        experts = (self.experts_active + self.shared_experts) * self.expert_weights()
        sparse = self.attention_weights() + self.hidden * self.experts + experts
        layers = (self.layers - self.expert_layers) * dense + self.expert_layers * sparse
        return layers + self.vocab * self.hidden

    def attention_flops(self, sequence: int = 0) -> float:
        """Of one token in one layer, forward, if every token sees every other."""
        width = self.attention_width
        if self.kv_rank:  # scores over the rotary part, too
            return 2.0 * (sequence or self.sequence) * (2 * width + self.heads * self.rope_head)
        return 4.0 * (sequence or self.sequence) * width

    def flops_per_token(self, sequence: int = 0) -> float:
        """Model FLOPs of one token, forward and backward, as PaLM and Megatron count them: the
        whole square of the attention, and no recomputation."""
        forward = 2.0 * self.matmul_weights() + self.layers * self.attention_flops(sequence)
        return 3.0 * forward

    def check(self) -> Model:
        """This model, or a sentence about its first field that cannot be."""
        for field, least, most in _BOUNDS:
            value = getattr(self, field)
            at_least(f"model {self.name}: {field}", value, least)
            at_most(f"model {self.name}: {field}", value, most)
        if not self.head and self.hidden % self.heads:
            raise Impossible(
                f"model {self.name}: hidden {self.hidden} is not a multiple of heads {self.heads}; "
                "give the size of a head (head)"
            )
        if self.heads % self.kv:
            raise Impossible(
                f"model {self.name}: heads {self.heads} is not a multiple of kv_heads {self.kv}"
            )
        if self.experts and not 1 <= self.experts_active <= self.experts:
            raise Impossible(
                f"model {self.name}: experts_active is {self.experts_active}: it must be from 1 to "
                f"experts ({self.experts})"
            )
        if self.dense_layers > self.layers:
            raise Impossible(
                f"model {self.name}: dense_layers {self.dense_layers} is more than layers "
                f"{self.layers}"
            )
        return self


_BOUNDS = (
    ("layers", 1, LAYERS_MAX),
    ("hidden", 1, SIZE_MAX),
    ("heads", 1, SIZE_MAX),
    ("kv_heads", 0, SIZE_MAX),
    ("head", 0, SIZE_MAX),
    ("ffn", 0, SIZE_MAX),
    ("vocab", 1, SIZE_MAX),
    ("sequence", 1, SEQUENCE_MAX),
    ("positions", 0, SEQUENCE_MAX),
    ("experts", 0, EXPERTS_MAX),
    ("experts_active", 0, EXPERTS_MAX),
    ("shared_experts", 0, EXPERTS_MAX),
    ("expert_ffn", 0, SIZE_MAX),
    ("dense_layers", 0, LAYERS_MAX),
    ("expert_nodes", 0, EXPERTS_MAX),
    ("query_rank", 0, SIZE_MAX),
    ("kv_rank", 0, SIZE_MAX),
    ("rope_head", 0, SIZE_MAX),
)
