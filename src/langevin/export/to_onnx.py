"""A trained classifier as an ONNX file: tokens of any batch and length to calibrated probabilities.

    input_ids (B, L) int64, attention_mask (B, L) bool, padding at the right  ->  probabilities (B, C)

int8: the weights of matrices have 7 bits and a scale for each column, since products of 8 bits overflow on
processors without VNNI; what they are multiplied with is quantised as it comes. Embeddings have 8 bits and
a scale for each row. A file is kept only after it has said of real texts what PyTorch says.
"""

import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from langevin.data.examples import around, reading
from langevin.errors import UsageError, WorkError, one_line
from langevin.evaluation.classes import classifier
from langevin.export.runtime import INPUTS, LABELS, MARK, TOKENIZER, OnnxClassifier, checksum
from langevin.objectives.classify import logits_of, temperature_of
from langevin.runs.folder import check_data
from langevin.tasks.classify import some_rows

FILES = {"onnx": "model.onnx", "onnx int8": "model-int8.onnx"}
TOLERANCE = 1e-4  # of probabilities, in float32
SMALLEST = 1024  # parameters of a matrix that is worth quantising
LENGTH, TURNS = 128, 50  # of the text and the runs that are timed


class Probabilities(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        logits = logits_of(self.model, {"input_ids": input_ids, "attention_mask": attention_mask})
        return (logits / temperature_of(self.model)).softmax(-1)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' remarks, which are not for our users."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def graph_of(model: nn.Module) -> Any:
    """The ONNX graph of a classifier, with nothing in it that does not compute."""
    tokens, real = torch.ones(2, 24, dtype=torch.long), torch.ones(2, 24, dtype=torch.bool)
    real[1, 16:] = False
    dynamic = {name: {0: "batch", 1: "length"} for name in INPUTS}
    try:
        with _quiet():
            program: Any = torch.onnx.export(
                Probabilities(model.cpu()).eval(),
                (tokens, real),
                input_names=INPUTS,
                output_names=["probabilities"],
                dynamic_shapes=dynamic,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:  # of a class for each stage
        mixer = getattr(model.config, "mixer", type(model).__name__)
        raise UsageError(
            f"a classifier with {mixer} cannot be exported: {one_line(error.__cause__ or error)}",
            "Use another mixer.",
        ) from None
    proto = program.model_proto
    graph = proto.graph
    del graph.value_info[:], graph.metadata_props[:], proto.metadata_props[:]
    for part in (*graph.node, *graph.initializer, *graph.input, *graph.output):
        part.doc_string = ""
        del part.metadata_props[:]
    _transpose_weights(graph)
    return proto


def _transpose_weights(graph: Any) -> None:
    """Weights as matrices are multiplied with them, also those that several products share."""
    from onnx import numpy_helper

    weights = {weight.name: weight for weight in graph.initializer}
    for node in [n for n in graph.node if n.op_type == "Transpose" and n.input[0] in weights]:
        weight, (order,) = weights[node.input[0]], (a.ints for a in node.attribute if a.name == "perm")
        turned = numpy_helper.to_array(weight).transpose(*order)
        graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(turned), node.output[0]))
        graph.node.remove(node)
    used = {name for node in graph.node for name in node.input}
    for weight in [w for w in graph.initializer if w.name not in used]:
        graph.initializer.remove(weight)


def quantised(proto: Any) -> Any:
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    small = onnx.ModelProto()
    small.CopyFrom(proto)
    _quantise_embeddings(small.graph)
    with tempfile.TemporaryDirectory() as folder, _quiet():
        path = Path(folder) / "model.onnx"
        quantize_dynamic(
            small,
            path,
            op_types_to_quantize=["MatMul"],
            weight_type=QuantType.QInt8,
            per_channel=True,
            reduce_range=True,
        )
        return onnx.load(path)


def _quantise_embeddings(graph: Any) -> None:
    """E[i]  =  s_i · int8(E[i] / s_i),   s_i = max |E[i]| / 127 in 16 bits."""
    from onnx import TensorProto, helper, numpy_helper

    weights = {w.name: w for w in graph.initializer if len(w.dims) == 2 and np.prod(w.dims) >= SMALLEST}
    nodes = []
    for node in graph.node:
        weight = weights.get(node.input[0]) if node.op_type == "Gather" else None
        if weight is None or weight.data_type != TensorProto.FLOAT:
            nodes.append(node)
            continue
        table, (found,) = numpy_helper.to_array(weight), node.output
        scale = np.maximum(np.abs(table).max(1, keepdims=True) / 127, 1e-6).astype(np.float16)
        whole = np.rint(table / scale.astype(np.float32)).clip(-127, 127).astype(np.int8)
        for name, values in (("int8", whole), ("scale", scale)):
            stored, drawn, part = f"{weight.name}.{name}", f"{found}.{name}", f"{found}.{name}.float"
            graph.initializer.append(numpy_helper.from_array(values, stored))
            nodes.append(helper.make_node("Gather", [stored, node.input[1]], [drawn]))
            nodes.append(helper.make_node("Cast", [drawn], [part], to=TensorProto.FLOAT))
        nodes.append(helper.make_node("Mul", [f"{found}.int8.float", f"{found}.scale.float"], [found]))
        graph.initializer.remove(weight)
    del graph.node[:]
    graph.node.extend(nodes)


def export(
    run: Any,
    out: Path,
    *,
    int8: bool = False,
    split: str = "valid",
    limit: int | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> list[dict[str, Any]]:
    """Write model.onnx, model-int8.onnx if asked for, tokenizer.json and labels.json into a folder; a row
    of what each costs and says of a split, PyTorch first."""
    try:
        import onnx
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise UsageError(f"{error.name} is not installed", "Run pip install 'langevin[edge]'.") from None
    _check_writable(out)
    data = run.task.prepare(run.config)
    check_data(run.path, data.manifest, run.config.data)
    rows = some_rows(data, split, limit)
    texts, labels = np.array(data.texts(split), object)[rows].tolist(), data.labels(split)[rows]
    progress("exporting")
    graphs = {"onnx": graph_of(run.model)}
    if int8:
        progress("quantising")
        graphs["onnx int8"] = quantised(graphs["onnx"])
    classify, names = classifier(run, "cpu", 64)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        mark = _write_texts(run, names, Path(folder))
        for name, graph in graphs.items():
            graph.metadata_props.add(key=MARK, value=mark)
            onnx.save(graph, Path(folder) / FILES[name])
        found: dict[str, Any] = {"PyTorch": classify}
        found |= {name: OnnxClassifier(Path(folder) / FILES[name], threads=1) for name in graphs}
        said = {}
        for name, own in found.items():
            progress(f"{name}: {len(texts):,} texts of {split}")
            said[name] = own(texts)
        _refuse_other(said["PyTorch"], said["onnx"])
        _refuse_other(said["PyTorch"][:20], np.concatenate([found["onnx"]([text]) for text in texts[:20]]))
        progress("timing")
        times = _times(run.model, {name: found[name] for name in graphs}, min(LENGTH, run.config.context))
        text = " ".join(max(texts, key=len).split()[:LENGTH])
        measured = []
        for name, p in said.items():
            file = Path(folder) / FILES[name] if name in graphs else None
            right, torch_right = (q.argmax(-1) == labels for q in (p, said["PyTorch"]))
            row: dict[str, Any] = {"model": name, "bytes": None if file is None else file.stat().st_size}
            row |= {f"ms_p{at}": float(np.percentile(times[name], at)) for at in (50, 90)}
            row["peak_mb"] = None if file is None else peak_mb(file, text)
            row |= {"split": split, "texts": len(texts), "accuracy": float(right.mean())}
            row["accuracy_change"] = float(right.mean() - torch_right.mean())
            row["same_label"] = float((p.argmax(-1) == said["PyTorch"].argmax(-1)).mean())
            row["largest_difference"] = float(np.abs(p - said["PyTorch"]).max())
            measured.append(row)
        out.mkdir(exist_ok=True)
        for made in Path(folder).iterdir():
            os.replace(made, out / made.name)
    return measured


def _check_writable(out: Path) -> None:
    """By writing: files are made in a folder beside it, and then moved into it."""
    try:
        for folder in (out.parent, *([out] if out.exists() else [])):
            with tempfile.TemporaryDirectory(dir=folder):
                pass
    except OSError as error:
        raise UsageError(f"{out} cannot be written: {error.strerror}", "Choose another --out.") from None


def _write_texts(run: Any, names: list[str], folder: Path) -> str:
    """tokenizer.json and labels.json; the checksum of the latter."""
    tokenizer = reading(run.tokenizer, run.config.context)
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    tokenizer.backend_tokenizer.save(str(folder / TOKENIZER), pretty=False)
    before, behind = around(tokenizer)
    told = {
        "labels": names,
        "context": run.config.context,
        "pad": tokenizer.pad_token_id,
        "before": before,
        "behind": behind,
        "text_column": getattr(run.task, "text_column", None),
        "tokenizer": checksum((folder / TOKENIZER).read_bytes()),
    }
    (folder / LABELS).write_text(json.dumps(told, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return checksum((folder / LABELS).read_bytes())


def _refuse_other(ours: Any, exported: Any) -> None:
    largest = float(np.abs(ours - exported).max())
    if not largest <= TOLERANCE:
        raise WorkError(
            f"the exported model says {largest:.2g} other probabilities than PyTorch: nothing was written",
            "Report this with the run's config.yaml.",
        )


@torch.no_grad()
def _times(model: Any, exported: dict[str, OnnxClassifier], length: int) -> dict[str, list[float]]:
    """Milliseconds of one text of so many tokens on one thread, in turns."""
    ids = np.random.default_rng(0).integers(model.config.vocab_size, size=(1, length))
    rows = dict(zip(INPUTS, (ids, np.ones_like(ids, bool)), strict=True))
    tensors = {name: torch.from_numpy(x) for name, x in rows.items()}
    cases: dict[str, Callable[[], Any]] = {"PyTorch": lambda: model(**tensors)}
    for name, own in exported.items():
        cases[name] = lambda own=own: own.probabilities(**rows)  # type: ignore[misc]
    times: dict[str, list[float]] = {name: [] for name in cases}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for turn in range(TURNS + 5):
            for name, case in cases.items():
                begin = time.perf_counter()
                case()
                times[name] += [1000 * (time.perf_counter() - begin)] if turn >= 5 else []
    finally:
        torch.set_num_threads(threads)
    return times


PROBE = """
import sys
from pathlib import Path
from langevin.export.runtime import OnnxClassifier
OnnxClassifier(Path(sys.argv[1]), batch=1, threads=1)([sys.argv[2]])
print(open("/proc/self/status").read())
"""


def peak_mb(file: Path, text: str) -> float | None:
    """The most memory (10⁶ bytes) of a process that classifies a text and does nothing else; None where
    the system does not tell."""
    told = subprocess.run([sys.executable, "-c", PROBE, str(file), text], capture_output=True, text=True)
    peak = re.search(r"VmHWM:\s+(\d+) kB", told.stdout)
    return None if peak is None else int(peak[1]) * 1024 / 1e6
