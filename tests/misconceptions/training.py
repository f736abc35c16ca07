"""Mistakes that people make in adding gradients up, in evaluating, and in saving and loading a training."""

import contextlib
import math
import os
import random
import shutil
import tempfile
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from . import wrong

IGNORE = -100

# accumulate_gradients -------------------------------------------------------------------------------------------------


def _mean(model, inputs, labels):
    """The mean over the counted labels, 0 where there are none."""
    return _sum(model, inputs, labels) / max(_counted(labels), 1)


def _sum(model, inputs, labels):
    return F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum")


def _counted(labels):
    return int((labels != IGNORE).sum())


def _add_up(model, micro_batches, total):
    """Right but for what `total` labels are."""
    loss_of_all = 0.0
    for inputs, labels in micro_batches:
        if _counted(labels):
            loss = _sum(model, inputs, labels) / total
            loss.backward()
            loss_of_all += loss.item()
    return loss_of_all


_MEAN_OF_MEANS = (
    "This is the mean of the micro-batches' means, in which a label of a small micro-batch weighs more. "
    "Weigh each micro-batch by its share of all counted labels."
)


@wrong("accumulate_gradients", caught_by="test_parts_equal_the_whole", hint=_MEAN_OF_MEANS)
def mean_of_means(model, micro_batches):
    micro_batches, total = list(micro_batches), 0.0
    for inputs, labels in micro_batches:
        if _counted(labels):
            loss = _mean(model, inputs, labels) / len(micro_batches)
            loss.backward()
            total += loss.item()
    return total


@wrong("accumulate_gradients", caught_by="test_parts_equal_the_whole", hint=_MEAN_OF_MEANS)
def mean_of_counted_means(model, micro_batches):
    return mean_of_means(model, [batch for batch in micro_batches if _counted(batch[1])])


@wrong("accumulate_gradients", caught_by="test_parts_equal_the_whole", hint=_MEAN_OF_MEANS)
def mean_of_torchs_means(model, micro_batches):
    micro_batches, total = list(micro_batches), 0.0
    for inputs, labels in micro_batches:
        logits = model(inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE) / len(micro_batches)
        loss.backward()
        total += loss.item()
    return total


@wrong(
    "accumulate_gradients",
    caught_by="test_ignored_labels_do_not_weigh",
    hint="Micro-batches weigh by all their labels, those to ignore included. "
    "Count the labels that are not IGNORE, and divide by these.",
)
def weighed_by_all_labels(model, micro_batches):
    micro_batches = list(micro_batches)
    n_all, total = sum(labels.numel() for _, labels in micro_batches), 0.0
    for inputs, labels in micro_batches:
        if _counted(labels):
            loss = _mean(model, inputs, labels) * labels.numel() / n_all
            loss.backward()
            total += loss.item()
    return total


@wrong(
    "accumulate_gradients",
    caught_by="test_parts_equal_the_whole",
    hint="Micro-batches weigh by their sequences. A long sequence has more labels: weigh by the counted labels.",
)
def weighed_by_sequences(model, micro_batches):
    micro_batches = list(micro_batches)
    n_all, total = sum(len(labels) for _, labels in micro_batches if _counted(labels)), 0.0
    for inputs, labels in micro_batches:
        if _counted(labels):
            loss = _mean(model, inputs, labels) * len(labels) / n_all
            loss.backward()
            total += loss.item()
    return total


@wrong(
    "accumulate_gradients",
    caught_by="test_parts_equal_the_whole",
    hint="The micro-batches' means are added, not averaged: with n of them the gradient is about n times too large. "
    "Weigh each by its share of all counted labels; the shares add up to 1.",
)
def sum_of_means(model, micro_batches):
    total = 0.0
    for inputs, labels in micro_batches:
        if _counted(labels):
            loss = _mean(model, inputs, labels)
            loss.backward()
            total += loss.item()
    return total


@wrong(
    "accumulate_gradients",
    caught_by="test_parts_equal_the_whole",
    hint="The loss is right, but the gradients are those of a sum of means. "
    "Run backward from the weighted loss, not from the micro-batch's own mean.",
)
def only_the_loss_is_weighted(model, micro_batches):
    micro_batches = list(micro_batches)
    n, total = sum(_counted(labels) for _, labels in micro_batches), 0.0
    for inputs, labels in micro_batches:
        if _counted(labels):
            loss = _mean(model, inputs, labels)
            loss.backward()
            total += loss.item() * _counted(labels) / n
    return total


@wrong(
    "accumulate_gradients",
    caught_by="test_parts_equal_the_whole",
    hint="The gradients are right, but the loss is the mean of the micro-batches' means. "
    "Add the weighted losses up, from which backward runs.",
)
def only_the_gradients_are_weighted(model, micro_batches):
    micro_batches = list(micro_batches)
    n, means = sum(_counted(labels) for _, labels in micro_batches), []
    for inputs, labels in micro_batches:
        if _counted(labels):
            loss = _mean(model, inputs, labels)
            (loss * _counted(labels) / n).backward()
            means.append(loss.item())
    return sum(means) / max(len(means), 1)


@wrong(
    "accumulate_gradients",
    caught_by="test_parts_equal_the_whole",
    hint="The loss that is returned is the last micro-batch's. Add the weighted losses of all of them up.",
)
def loss_of_the_last(model, micro_batches):
    micro_batches, last = list(micro_batches), 0.0
    n = sum(_counted(labels) for _, labels in micro_batches)
    for inputs, labels in micro_batches:
        if _counted(labels):
            loss = _mean(model, inputs, labels)
            (loss * _counted(labels) / n).backward()
            last = loss.item()
    return last


@wrong(
    "accumulate_gradients",
    caught_by="test_gradients_are_added",
    hint="The gradients are set to zero first, so what was there is lost. Only add: the caller decides when to clear.",
)
def cleared_at_the_start(model, micro_batches):
    micro_batches = list(micro_batches)
    n = sum(_counted(labels) for _, labels in micro_batches)
    if n:
        model.zero_grad()
    return _add_up(model, micro_batches, n)


@wrong(
    "accumulate_gradients",
    caught_by="test_parts_equal_the_whole",
    hint="The gradients are cleared before every micro-batch, so only the last one's stay. Never clear them here.",
)
def cleared_every_time(model, micro_batches):
    micro_batches, total = list(micro_batches), 0.0
    n = sum(_counted(labels) for _, labels in micro_batches)
    for inputs, labels in micro_batches:
        if _counted(labels):
            model.zero_grad()
            loss = _sum(model, inputs, labels) / n
            loss.backward()
            total += loss.item()
    return total


@wrong(
    "accumulate_gradients",
    caught_by="test_gradients_are_added",
    hint="Dividing the gradients at the end also divides what was in them before. "
    "Divide each micro-batch's loss before its backward.",
)
def gradients_divided_at_the_end(model, micro_batches):
    n, total = 0, 0.0
    for inputs, labels in micro_batches:
        if _counted(labels):
            loss = _sum(model, inputs, labels)
            loss.backward()
            n, total = n + _counted(labels), total + loss.item()
    if n:
        for p in model.parameters():
            if p.grad is not None:
                p.grad /= n
    return total / max(n, 1)


@wrong(
    "accumulate_gradients",
    caught_by="test_one_micro_batch_at_a_time",
    hint="All micro-batches run forward before the one backward at the end, so memory holds the activations of all. "
    "Run backward for each before the next one starts.",
)
def one_backward_at_the_end(model, micro_batches):
    micro_batches = list(micro_batches)
    n = sum(_counted(labels) for _, labels in micro_batches)
    if not n:
        return 0.0
    loss = sum(_sum(model, inputs, labels) for inputs, labels in micro_batches if _counted(labels)) / n
    loss.backward()
    return loss.item()


@wrong(
    "accumulate_gradients",
    caught_by="test_parts_equal_the_whole",
    hint="The micro-batches are put together into one big batch, which need not fit into memory, and whose sequences "
    "may differ in length. Run one at a time, and weigh.",
)
def put_together(model, micro_batches):
    micro_batches = list(micro_batches)
    if sum(_counted(labels) for _, labels in micro_batches) == 0:
        return 0.0
    inputs, labels = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    loss = _mean(model, inputs, labels)
    loss.backward()
    return loss.item()


@wrong(
    "accumulate_gradients",
    caught_by="test_micro_batches_may_come_from_a_generator",
    hint="Counting the labels uses a generator up, and no micro-batch is left for the loop. "
    "Make a list of the micro-batches first.",
)
def used_up_by_counting(model, micro_batches):
    n = sum(_counted(labels) for _, labels in micro_batches)
    return _add_up(model, micro_batches, n)


@wrong(
    "accumulate_gradients",
    caught_by="test_ignored_labels_do_not_weigh",
    hint="A micro-batch without a counted label makes the loss and all gradients NaN: the mean of nothing is 0 / 0. "
    "Leave such a micro-batch out.",
)
def nan_from_nothing(model, micro_batches):
    micro_batches = list(micro_batches)
    n, total = sum(_counted(labels) for _, labels in micro_batches), 0.0
    for inputs, labels in micro_batches:
        loss = F.cross_entropy(model(inputs).flatten(0, 1), labels.flatten(), ignore_index=IGNORE)
        loss = loss * (_counted(labels) / max(n, 1))
        loss.backward()
        total += loss.item()
    return total


@wrong(
    "accumulate_gradients",
    caught_by="test_ignored_labels_do_not_weigh",
    hint="Labels that are IGNORE count as token 0. They must not count at all, in the loss or in its divisor.",
)
def ignored_as_token_0(model, micro_batches):
    micro_batches = [(inputs, labels.clamp(min=0)) for inputs, labels in micro_batches]
    return _add_up(model, micro_batches, sum(_counted(labels) for _, labels in micro_batches))


@wrong(
    "accumulate_gradients",
    caught_by="test_parts_equal_the_whole",
    hint="The labels are shifted once more, so that the model would learn the token after the next. "
    "They are given in their places: compare the logits with them as they are.",
)
def labels_shifted_again(model, micro_batches):
    micro_batches = [(inputs, labels.roll(-1, dims=1)) for inputs, labels in micro_batches]
    for _, labels in micro_batches:
        labels[:, -1] = IGNORE
    return _add_up(model, micro_batches, sum(_counted(labels) for _, labels in micro_batches))


@wrong(
    "accumulate_gradients",
    caught_by="test_nothing_counted_changes_nothing",
    hint="Without a counted label, backward fills the gradients that were None with zeros. An optimizer moves such a "
    "weight, by decay or momentum. Leave out micro-batches without a counted label.",
)
def zeros_from_nothing(model, micro_batches):
    micro_batches = list(micro_batches)
    n, total = sum(_counted(labels) for _, labels in micro_batches), 0.0
    for inputs, labels in micro_batches:
        loss = _sum(model, inputs, labels) / max(n, 1)
        loss.backward()
        total += loss.item()
    return total


@wrong(
    "accumulate_gradients",
    caught_by="test_nothing_counted_changes_nothing",
    hint="Without a counted label the divisor is 0. Then the loss is 0.0 and there is nothing to run: "
    "treat that case by itself.",
)
def division_by_no_labels(model, micro_batches):
    micro_batches, total = list(micro_batches), 0.0
    n = sum(_counted(labels) for _, labels in micro_batches)
    for inputs, labels in micro_batches:
        share = _counted(labels) / n
        if share:
            loss = _mean(model, inputs, labels) * share
            loss.backward()
            total += loss.item()
    return total


@wrong(
    "accumulate_gradients",
    caught_by="test_a_uniform_model_by_hand",
    hint="The loss is a tensor, which keeps its graph and the activations alive. Return a float: .item() makes one.",
)
def loss_as_a_tensor(model, micro_batches):
    micro_batches, total = list(micro_batches), torch.zeros((), dtype=torch.float64)
    n = sum(_counted(labels) for _, labels in micro_batches)
    for inputs, labels in micro_batches:
        if _counted(labels):
            loss = _sum(model, inputs, labels) / n
            loss.backward()
            total += loss.detach()
    return total


@wrong(
    "accumulate_gradients",
    caught_by="test_one_micro_batch_at_a_time",
    hint="The model runs forward more than once for a micro-batch, which takes time for nothing. "
    "The labels alone tell how many count.",
)
def run_once_to_count(model, micro_batches):
    micro_batches, n = list(micro_batches), 0
    for inputs, labels in micro_batches:
        if _counted(labels):
            n += len(model(inputs).detach()[labels != IGNORE])
    return _add_up(model, micro_batches, n)


@wrong(
    "accumulate_gradients",
    caught_by="test_the_model_itself_stays",
    hint="The model is put into train mode. Run it in the mode that it is in: that is for the caller to choose.",
)
def put_into_train_mode(model, micro_batches):
    model.train()
    micro_batches = list(micro_batches)
    return _add_up(model, micro_batches, sum(_counted(labels) for _, labels in micro_batches))


# evaluate -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _evaluating(model):
    """Right: eval mode and no gradients within the block, all modes as before after it."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def _over(total, n):
    if n == 0:
        raise ValueError("nothing counts")
    return total / n


def _total(model, batches):
    """Right: the sum of the losses and the number of counted labels."""
    total, n = 0.0, 0
    for inputs, labels in batches:
        total, n = total + _sum(model, inputs, labels).item(), n + _counted(labels)
    return total, n


_MEAN_OF_BATCH_MEANS = (
    "This is the mean of the batches' means, in which the labels of a small batch weigh more. "
    "Add up the losses of all labels, and divide once by how many count."
)


@wrong("evaluate", caught_by="test_every_label_weighs_the_same", hint=_MEAN_OF_BATCH_MEANS)
def mean_of_counted_batch_means(model, batches):
    with _evaluating(model):
        means = [_mean(model, x, y).item() for x, y in batches if _counted(y)]
    return _over(sum(means), len(means))


@wrong("evaluate", caught_by="test_every_label_weighs_the_same", hint=_MEAN_OF_BATCH_MEANS)
def mean_of_batch_means(model, batches):
    with _evaluating(model):
        means = [_mean(model, x, y).item() for x, y in batches]
    return sum(means) / len(means)


@wrong("evaluate", caught_by="test_every_label_weighs_the_same", hint=_MEAN_OF_BATCH_MEANS)
def mean_of_torchs_batch_means(model, batches):
    with _evaluating(model):
        pairs = [(model(x).flatten(0, 1), y.flatten()) for x, y in batches]
    return sum(F.cross_entropy(*pair, ignore_index=IGNORE).item() for pair in pairs) / len(pairs)


@wrong(
    "evaluate",
    caught_by="test_only_counted_labels_weigh",
    hint="Batches weigh by all their labels, those to ignore included. Count the labels that are not IGNORE.",
)
def batches_weighed_by_all_labels(model, batches):
    total, n = 0.0, 0
    with _evaluating(model):
        for x, y in batches:
            if _counted(y):
                total, n = total + _mean(model, x, y).item() * y.numel(), n + y.numel()
    return _over(total, n)


@wrong(
    "evaluate",
    caught_by="test_only_counted_labels_weigh",
    hint="Labels that are IGNORE count as token 0. They must not count at all, in the loss or in its divisor.",
)
def padding_counted_as_token_0(model, batches):
    with _evaluating(model):
        return _over(*_total(model, [(x, y.clamp(min=0)) for x, y in batches if _counted(y)]))


@wrong(
    "evaluate",
    caught_by="test_only_counted_labels_weigh",
    hint="A batch without a counted label makes the result NaN: torch's mean of nothing is 0 / 0, and NaN times 0 is "
    "NaN. Leave such a batch out.",
)
def nan_from_a_batch_of_nothing(model, batches):
    total, n = 0.0, 0
    with _evaluating(model):
        for x, y in batches:
            mean = F.cross_entropy(model(x).flatten(0, 1), y.flatten(), ignore_index=IGNORE)
            total, n = total + mean.item() * _counted(y), n + _counted(y)
    return _over(total, n)


@wrong(
    "evaluate",
    caught_by="test_every_label_weighs_the_same",
    hint="The losses are added up but not divided by the number of counted labels.",
)
def sum_not_divided(model, batches):
    with _evaluating(model):
        total, n = _total(model, batches)
    return _over(total, n) * n


@wrong(
    "evaluate",
    caught_by="test_a_uniform_model_scores_log_4",
    hint="This is the perplexity, e to the loss. Return the loss itself, in nats.",
)
def perplexity_instead(model, batches):
    with _evaluating(model):
        return math.exp(_over(*_total(model, batches)))


@wrong(
    "evaluate",
    caught_by="test_a_uniform_model_scores_log_4",
    hint="The result is a tensor. Return a float: .item() makes one.",
)
def score_as_a_tensor(model, batches):
    with _evaluating(model):
        return torch.tensor(_over(*_total(model, batches)), dtype=torch.float64)


@wrong(
    "evaluate",
    caught_by="test_it_runs_in_eval_mode",
    hint="The model runs in whatever mode it is in, so that dropout still drops. Call model.eval() first.",
)
def without_eval_mode(model, batches):
    with torch.no_grad():
        return _over(*_total(model, batches))


@wrong(
    "evaluate",
    caught_by="test_every_part_gets_its_own_mode_back",
    hint="The model stays in eval mode, and training would go on without dropout. Note each module's mode before, "
    "and set it again afterwards.",
)
def left_in_eval_mode(model, batches):
    model.eval()
    with torch.no_grad():
        return _over(*_total(model, batches))


@wrong(
    "evaluate",
    caught_by="test_every_part_gets_its_own_mode_back",
    hint="Afterwards everything is in train mode, also what was in eval mode before. Note each module's mode, "
    "and set it again.",
)
def always_back_to_train_mode(model, batches):
    model.eval()
    try:
        with torch.no_grad():
            return _over(*_total(model, batches))
    finally:
        model.train()


@wrong(
    "evaluate",
    caught_by="test_every_part_gets_its_own_mode_back",
    hint="All parts get the mode that the whole model had, since train(mode) passes it on to every part. "
    "Note the mode of each of model.modules(), and set its `training` again.",
)
def mode_of_the_whole_for_all_parts(model, batches):
    mode = model.training
    model.eval()
    try:
        with torch.no_grad():
            return _over(*_total(model, batches))
    finally:
        model.train(mode)


@wrong(
    "evaluate",
    caught_by="test_every_part_gets_its_own_mode_back",
    hint="Only the model's own parts get their modes back, and parts of parts get that of the part. "
    "model.modules() has all of them, model.children() only the first level.",
)
def modes_of_the_first_level(model, batches):
    own, modes = model.training, [(child, child.training) for child in model.children()]
    model.eval()
    try:
        with torch.no_grad():
            return _over(*_total(model, batches))
    finally:
        model.training = own
        for child, mode in modes:
            child.train(mode)


@wrong(
    "evaluate",
    caught_by="test_modes_come_back_after_an_error",
    hint="After an error the model stays in eval mode, since the lines that set the modes again are skipped. "
    "Put them into `finally`.",
)
def modes_lost_by_an_error(model, batches):
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        total, n = _total(model, batches)
    for module, mode in modes:
        module.training = mode
    return _over(total, n)


@wrong(
    "evaluate",
    caught_by="test_it_leaves_gradients_alone",
    hint="The model records everything for a backward that never comes, which costs memory. "
    "Run it under torch.no_grad().",
)
def gradients_recorded(model, batches):
    with _evaluating(model), torch.enable_grad():
        return _over(*_total(model, batches))


@wrong(
    "evaluate",
    caught_by="test_it_leaves_gradients_alone",
    hint="Gradients are switched off for good, so that nothing can be trained afterwards. "
    "Use `with torch.no_grad():`, which ends with its block.",
)
def gradients_off_for_good(model, batches):
    with _evaluating(model):
        score = _over(*_total(model, batches))
    torch.set_grad_enabled(False)
    return score


@wrong(
    "evaluate",
    caught_by="test_it_leaves_gradients_alone",
    hint="The parameters' gradients are cleared. An evaluation must leave them: the caller may still need them.",
)
def gradients_cleared(model, batches):
    model.zero_grad()
    with _evaluating(model):
        return _over(*_total(model, batches))


@wrong(
    "evaluate",
    caught_by="test_nothing_to_evaluate_is_an_error",
    hint="Where no label counts, the result is a number, as if there had been something to evaluate. "
    "Raise a ValueError if the count is 0.",
)
def nothing_scores_0(model, batches):
    with _evaluating(model):
        total, n = _total(model, batches)
    return total / max(n, 1)


@wrong(
    "evaluate",
    caught_by="test_nothing_to_evaluate_is_an_error",
    hint="Where no label counts, Python's error for a division by zero comes out. "
    "Check the count first, and raise a ValueError.",
)
def divided_by_nothing(model, batches):
    with _evaluating(model):
        total, n = _total(model, batches)
    return total / n


@wrong(
    "evaluate",
    caught_by="test_batches_may_come_from_a_generator",
    hint="Counting the labels uses a generator up, and no batch is left to run. Count in the same loop.",
)
def batches_used_up_by_counting(model, batches):
    n = sum(_counted(labels) for _, labels in batches)
    with _evaluating(model):
        return _over(_total(model, batches)[0], n)


# save_checkpoint ------------------------------------------------------------------------------------------------------


def _numpy_state():
    name, keys, *rest = np.random.get_state()
    return name, keys.tolist(), *rest


def _generators():
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    return {"torch": torch.get_rng_state(), "cuda": cuda, "python": random.getstate(), "numpy": _numpy_state()}


def _contents(model, optimizer, step):
    """Right: all that the file must hold."""
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
    return {**state, "random": _generators()}


def _write(path, state):
    """Right: by a file beside it."""
    partial = Path(f"{path}.partial")
    try:
        torch.save(state, partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@wrong(
    "save_checkpoint",
    caught_by="test_a_failure_leaves_the_old_file",
    hint="The old file is opened for writing, and is gone if anything fails from then on. "
    "Write to `path`.partial, then os.replace(partial, path).",
)
def written_in_place(path, model, optimizer, step):
    torch.save(_contents(model, optimizer, step), path)


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_is_whole_at_every_moment",
    hint="The bytes are written over the old file, so that for a moment it is only half there. "
    "Write them to `path`.partial, then os.replace(partial, path).",
)
def bytes_written_in_place(path, model, optimizer, step):
    import io

    buffer = io.BytesIO()
    torch.save(_contents(model, optimizer, step), buffer)
    Path(path).write_bytes(buffer.getvalue())


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_is_whole_at_every_moment",
    hint="Copying the partial file over the old one leaves a moment with half a file. "
    "os.replace(partial, path) puts it there at once.",
)
def copied_over(path, model, optimizer, step):
    partial = Path(f"{path}.partial")
    try:
        torch.save(_contents(model, optimizer, step), partial)
        shutil.copyfile(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_is_whole_at_every_moment",
    hint="The old file is removed before the new one takes its place, so for a moment there is none. "
    "os.replace does both at once.",
)
def removed_first(path, model, optimizer, step):
    path, partial = Path(path), Path(f"{path}.partial")
    try:
        torch.save(_contents(model, optimizer, step), partial)
        path.unlink(missing_ok=True)
        partial.rename(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@wrong(
    "save_checkpoint",
    caught_by="test_a_failure_leaves_the_old_file",
    hint="If writing fails, `path`.partial is left behind. Remove it in an `except` and raise again.",
)
def partial_left_behind(path, model, optimizer, step):
    partial = f"{path}.partial"
    torch.save(_contents(model, optimizer, step), partial)
    os.replace(partial, path)


@wrong(
    "save_checkpoint",
    caught_by="test_a_failure_leaves_the_old_file",
    hint="If the last step fails, os.replace, `path`.partial is left behind. "
    "Let the `try` hold both steps, the writing and the replacing.",
)
def partial_left_by_the_last_step(path, model, optimizer, step):
    partial = Path(f"{path}.partial")
    try:
        torch.save(_contents(model, optimizer, step), partial)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    os.replace(partial, path)


@wrong(
    "save_checkpoint",
    caught_by="test_a_failure_leaves_the_old_file",
    hint="An error while writing is swallowed, so that the caller takes the checkpoint for saved. "
    "Clean up, then raise the error again.",
)
def error_swallowed(path, model, optimizer, step):
    with contextlib.suppress(Exception):
        _write(path, _contents(model, optimizer, step))


@wrong(
    "save_checkpoint",
    caught_by="test_a_failure_leaves_the_old_file",
    hint="If writing fails, the old file is removed as well. Only the partial file is yours to remove.",
)
def old_file_removed_after_a_failure(path, model, optimizer, step):
    try:
        _write(path, _contents(model, optimizer, step))
    except BaseException:
        if Path(path).is_file():
            os.remove(path)
        raise


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_is_whole_at_every_moment",
    hint="with_suffix replaces the ending: last.pt gives last.partial, which may be another file. "
    "Append to the whole name: last.pt.partial.",
)
def suffix_replaced(path, model, optimizer, step):
    partial = Path(path).with_suffix(".partial")
    try:
        torch.save(_contents(model, optimizer, step), partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_is_whole_at_every_moment",
    hint="The file is first written somewhere else, perhaps on another disk, from where it can only be copied, "
    "not moved at once. Write `path`.partial, beside `path`.",
)
def written_elsewhere(path, model, optimizer, step):
    with tempfile.TemporaryDirectory() as folder:
        partial = Path(folder) / Path(path).name
        torch.save(_contents(model, optimizer, step), partial)
        os.replace(partial, path)


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_is_whole_at_every_moment",
    hint="The file beside is not called `path`.partial. What a killed process leaves under another name is never "
    "replaced, and stays.",
)
def another_name_beside(path, model, optimizer, step):
    partial = Path(f"{path}.tmp{os.getpid()}")
    try:
        torch.save(_contents(model, optimizer, step), partial)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@wrong(
    "save_checkpoint",
    caught_by="test_a_killed_process_is_no_hindrance",
    hint="A partial file that a killed process has left makes every later save fail. Write over it: open it with 'wb'.",
)
def hindered_by_an_old_partial(path, model, optimizer, step):
    partial = Path(f"{path}.partial")
    if partial.exists():
        raise FileExistsError(partial)
    _write(path, _contents(model, optimizer, step))


@wrong(
    "save_checkpoint",
    caught_by="test_only_this_file_is_written",
    hint='A `path` that is a Path cannot be added to a text. f"{path}.partial" takes both.',
)
def only_a_path_as_text(path, model, optimizer, step):
    partial = path + ".partial"
    _write(partial.removesuffix(".partial"), _contents(model, optimizer, step))


@wrong(
    "save_checkpoint",
    caught_by="test_only_this_file_is_written",
    hint="A `path` that is a text has no methods of a Path. Begin with path = Path(path), which takes both.",
)
def only_a_path_object(path, model, optimizer, step):
    partial = path.with_name(path.name + ".partial")
    _write(partial.with_suffix(""), _contents(model, optimizer, step))


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_holds_model_optimizer_and_step",
    hint='The parts of the file have other names than "model", "optimizer", "step" and "random", by which '
    "load_checkpoint looks for them.",
)
def other_names(path, model, optimizer, step):
    state = _contents(model, optimizer, step)
    state["model_state_dict"], state["optimizer_state_dict"] = state.pop("model"), state.pop("optimizer")
    _write(path, state)


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_holds_model_optimizer_and_step",
    hint="The optimizer's state is missing: without its moments training does not go on as before. "
    'Save "optimizer" too.',
)
def without_the_optimizer(path, model, optimizer, step):
    state = _contents(model, optimizer, step)
    del state["optimizer"]
    _write(path, state)


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_holds_model_optimizer_and_step",
    hint='The states of the random generators are missing: dropout and batches would differ. Save "random" too.',
)
def without_random_states(path, model, optimizer, step):
    state = _contents(model, optimizer, step)
    del state["random"]
    _write(path, state)


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_holds_the_random_states",
    hint='Only torch\'s random state is saved. Python and NumPy have generators too: "python" and "numpy".',
)
def only_torchs_random_state(path, model, optimizer, step):
    state = _contents(model, optimizer, step)
    state["random"] = {"torch": state["random"]["torch"], "cuda": state["random"]["cuda"]}
    _write(path, state)


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_holds_the_random_states",
    hint="The seed is saved, and not the state: after a few draws the generator is somewhere else. "
    "Save torch.get_rng_state().",
)
def seed_for_a_state(path, model, optimizer, step):
    state = _contents(model, optimizer, step)
    fresh = torch.Generator().manual_seed(torch.initial_seed())
    state["random"]["torch"] = fresh.get_state()
    _write(path, state)


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_holds_the_random_states",
    hint="NumPy's state holds an array, which does not load with weights_only=True. Turn it into a list: .tolist().",
)
def numpy_array_in_the_file(path, model, optimizer, step):
    state = _contents(model, optimizer, step)
    state["random"]["numpy"] = np.random.get_state()
    _write(path, state)


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_holds_model_optimizer_and_step",
    hint="The model itself is saved, as an object, which does not load with weights_only=True, nor after its class has "
    "changed. Save model.state_dict().",
)
def model_as_an_object(path, model, optimizer, step):
    _write(path, {**_contents(model, optimizer, step), "model": model})


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_holds_model_optimizer_and_step",
    hint="Only the parameters are saved. A model may have buffers too, such as running means: save model.state_dict().",
)
def parameters_without_buffers(path, model, optimizer, step):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    _write(path, {**_contents(model, optimizer, step), "model": parameters})


@wrong(
    "save_checkpoint",
    caught_by="test_the_file_holds_model_optimizer_and_step",
    hint="The step in the file is not the one that was given. Save it as it is: the caller has counted.",
)
def next_step(path, model, optimizer, step):
    _write(path, _contents(model, optimizer, step + 1))


@wrong(
    "save_checkpoint",
    caught_by="test_saving_disturbs_nothing",
    hint="The model is left in eval mode, and training would go on without dropout. Saving needs no mode.",
)
def saved_in_eval_mode(path, model, optimizer, step):
    model.eval()
    _write(path, _contents(model, optimizer, step))


# load_checkpoint ------------------------------------------------------------------------------------------------------


def _read(path):
    return torch.load(path, map_location="cpu", weights_only=True)


def _set_generators(states, parts=("torch", "python", "numpy")):
    """Right, with all parts."""
    if "torch" in parts:
        torch.set_rng_state(states["torch"])
    if "python" in parts:
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
    if "numpy" in parts:
        name, keys, *rest = states["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if torch.cuda.is_available() and states["cuda"]:
        torch.cuda.set_rng_state_all(states["cuda"])


@wrong(
    "load_checkpoint",
    caught_by="test_the_optimizer_comes_back",
    hint="The optimizer's state is not restored, so its moments start from zero again. "
    'Call optimizer.load_state_dict(state["optimizer"]).',
)
def optimizer_forgotten(path, model, optimizer=None):
    state = _read(path)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        _set_generators(state["random"])
    return state["step"]


@wrong(
    "load_checkpoint",
    caught_by="test_the_random_generators_come_back",
    hint="The random generators are not restored, so dropout and batches differ from an unbroken training. "
    'Set them to state["random"].',
)
def generators_forgotten(path, model, optimizer=None):
    state = _read(path)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    return state["step"]


@wrong(
    "load_checkpoint",
    caught_by="test_the_random_generators_come_back",
    hint="Only torch's random generator is restored. Python's and NumPy's are in the file too.",
)
def only_torchs_generator(path, model, optimizer=None):
    state = _read(path)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        _set_generators(state["random"], ("torch",))
    return state["step"]


@wrong(
    "load_checkpoint",
    caught_by="test_without_an_optimizer_only_the_model",
    hint="Without an optimizer the random generators are moved, too: looking at a model changes what is drawn next. "
    "Restore them only where an optimizer is given.",
)
def generators_always_restored(path, model, optimizer=None):
    state = _read(path)
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    _set_generators(state["random"])
    return state["step"]


@wrong(
    "load_checkpoint",
    caught_by="test_without_an_optimizer_only_the_model",
    hint="It fails without an optimizer, where it tries to restore that of None. "
    "Restore the optimizer and the random generators only if one is given.",
)
def optimizer_always_expected(path, model, optimizer=None):
    state = _read(path)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    _set_generators(state["random"])
    return state["step"]


@wrong(
    "load_checkpoint",
    caught_by="test_training_goes_on_bit_by_bit",
    hint="assign=True puts new parameters into the model, and the optimizer goes on stepping the old ones: nothing is "
    "learned any more. Copy the values: model.load_state_dict(state).",
)
def parameters_exchanged(path, model, optimizer=None):
    state = _read(path)
    model.load_state_dict(state["model"], assign=True)
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        _set_generators(state["random"])
    return state["step"]


@wrong(
    "load_checkpoint",
    caught_by="test_training_goes_on_bit_by_bit",
    hint="The model is put into eval mode, so that training would go on without dropout. "
    "The mode is for the caller to choose.",
)
def loaded_into_eval_mode(path, model, optimizer=None):
    state = _read(path)
    model.load_state_dict(state["model"])
    model.eval()
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        _set_generators(state["random"])
    return state["step"]


@wrong(
    "load_checkpoint",
    caught_by="test_training_goes_on_bit_by_bit",
    hint="The model is put into train mode, also parts that are meant to stay in eval mode. "
    "The mode is for the caller to choose.",
)
def loaded_into_train_mode(path, model, optimizer=None):
    state = _read(path)
    model.load_state_dict(state["model"])
    model.train()
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        _set_generators(state["random"])
    return state["step"]


@wrong(
    "load_checkpoint",
    caught_by="test_the_model_comes_back",
    hint="Only the parameters are restored, and buffers such as running means are not. "
    "Call model.load_state_dict with all of the saved state.",
)
def buffers_forgotten(path, model, optimizer=None):
    state = _read(path)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(state["model"][name])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        _set_generators(state["random"])
    return state["step"]


@wrong(
    "load_checkpoint",
    caught_by="test_the_model_comes_back",
    hint="The step that is returned is one more than the file's. Return the step that was saved.",
)
def one_step_further(path, model, optimizer=None):
    return _restored(path, model, optimizer)["step"] + 1


@wrong(
    "load_checkpoint",
    caught_by="test_the_model_comes_back",
    hint="The whole contents of the file are returned. Return the step alone, a number.",
)
def contents_returned(path, model, optimizer=None):
    return _restored(path, model, optimizer)


@wrong(
    "load_checkpoint",
    caught_by="test_a_missing_file_is_an_error",
    hint="A missing file passes for a training at step 0, and a mistyped path goes unnoticed. "
    "Let torch.load raise its FileNotFoundError.",
)
def starts_anew_without_a_file(path, model, optimizer=None):
    return _restored(path, model, optimizer)["step"] if os.path.exists(path) else 0


@wrong(
    "load_checkpoint",
    caught_by="test_a_file_cannot_run_code",
    hint="With weights_only=False a file may run any code when it is loaded. Load it with weights_only=True.",
)
def trusts_every_file(path, model, optimizer=None):
    state = torch.load(path, map_location="cpu", weights_only=False)
    return _restored(path, model, optimizer, state)["step"]


def _restored(path, model, optimizer, state=None):
    """Right: everything restored; returns the file's contents."""
    state = _read(path) if state is None else state
    model.load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        _set_generators(state["random"])
    return state
