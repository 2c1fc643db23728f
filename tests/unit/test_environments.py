"""Environments: items, held-out split, rewards and faults of both kinds; prompts around them."""

import inspect
import json
import re
import subprocess
import sys
import threading

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megatron_rlzero.config import Environment as EnvironmentConfig
from megatron_rlzero.environments import DataError, build, prompts
from megatron_rlzero.environments.reasoning_gym import EVALUATED

WORDS = {"min_word_len": 4, "max_word_len": 8}


def spell(split="train", **changes):
    settings = {"task": "spell_backward", "parameters": WORDS, "size": 200, **changes}
    return build(EnvironmentConfig(**settings), split)


def word(problem):
    return problem.rsplit(" ", 1)[1]


def test_spell_backward_prompt_is_the_plain_sentence():
    problem = spell().problem(0)
    assert problem == f"Spell this word backward (example: sun -> nus): {word(problem)}"
    assert 4 <= len(word(problem)) <= 8


def test_template_goes_around_the_problem_and_braces_elsewhere_stay():
    problem = spell(prompt_template="{x} {problem}!").problem(3)
    assert problem == "{x} " + spell().problem(3) + "!"


def test_right_answer_counts_only_when_finished():
    environment = spell()
    for item in range(20):
        answer = word(environment.problem(item))[::-1]
        assert environment.grade(item, answer, True) == 1.0
        assert environment.grade(item, f" {answer}\n", True) == 1.0
        assert environment.grade(item, answer, False) == 0.0
        assert environment.grade(item, answer[:-1], True) == 0.0  # the task itself gives partial credit
        assert environment.grade(item, answer[:-1] + "#", True) == 0.0
        assert environment.grade(item, "", True) == 0.0


def test_items_are_the_same_each_time_and_follow_the_seed():
    first = [spell().problem(i) for i in range(10)]
    assert first == [spell().problem(i) for i in range(10)]
    assert first == [spell(size=50).problem(i) for i in range(10)]
    assert first != [spell(parameters={**WORDS, "seed": 1}).problem(i) for i in range(10)]


def test_held_out_questions_are_disjoint_although_the_generator_repeats():
    few = {"min_word_len": 3, "max_word_len": 3}  # so few words that the plain ranges overlap
    train, held_out = spell(parameters=few, size=400), spell("eval", parameters=few, size=400)
    trained = {train.problem(i) for i in range(len(train))}
    held = [held_out.problem(i) for i in range(len(held_out))]
    plain = {held_out.dataset[i]["question"] for i in range(400, 800)}
    assert plain & trained  # the control: without skipping they would meet
    assert set(held) == plain - trained
    assert len(held) == len(set(held))
    assert [spell("eval", parameters=few, size=400).problem(i) for i in (5, 2)] == [held[5], held[2]]
    with pytest.raises(IndexError, match=f"item {len(held)}: the eval split has items 0 to {len(held) - 1}"):
        held_out.problem(len(held))


def test_held_out_items_are_graded_as_themselves():
    held_out = spell("eval")
    answer = word(held_out.problem(7))[::-1]
    assert held_out.grade(7, answer, True) == 1.0
    assert spell().grade(7, answer, True) == 0.0


def test_a_scorer_that_raises_on_odd_text_means_wrong(caplog):
    environment = spell(task="prime_factorization", parameters={})
    assert environment.grade(0, "None", True) == 0.0
    assert "prime_factorization could not score 'None'" in caplog.text
    answer = environment.dataset[0]["answer"]
    assert environment.grade(0, answer, True) == 1.0


def test_every_task_that_evaluates_responses_is_known():
    """Those of the installed release whose files call eval, exec or sympy's parser with an answer, and no other."""
    from reasoning_gym.factory import DATASETS

    call = re.compile(r"\b(eval|exec|parse_expr)\((answer|full_code)\b")
    found = {name for name, (kind, _) in DATASETS.items() if call.search(inspect.getsource(inspect.getmodule(kind)))}
    assert found == set(EVALUATED)


def test_unknown_task_and_refused_parameters_are_named():
    with pytest.raises(DataError, match=r"environment.task = spel_backward: .*did you mean spell_backward"):
        spell(task="spel_backward")
    with pytest.raises(DataError, match=r"environment.parameters = .*max_word_len must be >= min_word_len"):
        spell(parameters={"min_word_len": 9, "max_word_len": 4})
    with pytest.raises(DataError, match=r"word_length.*it takes min_word_len, max_word_len"):
        spell(parameters={"word_length": 4})
    with pytest.raises(DataError, match=r"environment\.parameters\.size = 5: has its own key; use environment.size"):
        spell(parameters={"size": 5})
    with pytest.raises(DataError, match=r"environment.task = countdown: it runs text that a model wrote as Python"):
        spell(task="countdown", parameters={})
    part = {"name": "n_queens", "weight": 1.0, "config": {}}  # what a file can say, and composite does not understand
    with pytest.raises(DataError, match=r"environment.parameters = .*composite refuses them"):
        spell(task="composite", parameters={"datasets": [part]})
    with pytest.raises(ValueError, match="split = test: unknown"):
        spell("test")
    with pytest.raises(ValueError, match=r"environment\.kind = text: unknown"):
        build(EnvironmentConfig(kind="text"), "train")


def jsonl(tmp_path, text, split="train"):
    path = tmp_path / f"{split}.jsonl"
    path.write_text(text, encoding="utf-8")
    key = "path" if split == "train" else "eval_path"
    return build(EnvironmentConfig(kind="jsonl", **{key: str(path)}), split)


def records(*pairs):
    return "".join(json.dumps({"problem": problem, "answer": answer}) + "\n" for problem, answer in pairs)


def test_jsonl_grades_by_value(tmp_path):
    environment = jsonl(tmp_path, records(("half?", "\\frac{1}{2}"), ("6*7?", 42), ("expand", "(x+1)^2")))
    assert len(environment) == 3
    assert environment.problem(1) == "6*7?"
    for item, response in ((0, "It is $0.5$."), (0, "\\boxed{1/2}"), (1, "so 6*7 = 42"), (2, "\\boxed{x^2+2x+1}")):
        assert environment.grade(item, response, True) == 1.0, response
        assert environment.grade(item, response, False) == 0.0
    for item, response in ((0, "\\boxed{2}"), (1, "43"), (1, ""), (1, "\\frac{"), (2, "\\boxed{x^2+1}")):
        assert environment.grade(item, response, True) == 0.0, response


def test_jsonl_split_reads_its_own_file(tmp_path):
    assert jsonl(tmp_path, records(("a", 1)), "eval").problem(0) == "a"
    with pytest.raises(IndexError, match="item 1: the eval split has items 0 to 0"):
        jsonl(tmp_path, records(("a", 1)), "eval").problem(1)


def test_jsonl_lists_every_bad_line_with_its_fix(tmp_path):
    text = '{"problem": "a", "answer": 1}\n{"problem": "a"}\nnot json\n\n[1]\n{"problem": " ", "answer": "1"}\n'
    with pytest.raises(DataError) as caught:
        jsonl(tmp_path, text)
    lines = caught.value.violations
    assert [line.split(": line ")[1].split(":")[0] for line in lines] == ["2", "3", "4", "5", "6"]
    for line, part in zip(
        lines, ("answer is None", "not JSON", "empty", "not an object", "problem is ' '"), strict=True
    ):
        assert line.startswith(f"environment.path = {tmp_path}/train.jsonl: ")
        assert part in line
        assert ";" in line


def test_jsonl_caps_the_list_and_refuses_no_file(tmp_path):
    with pytest.raises(DataError) as caught:
        jsonl(tmp_path, "x\n" * 30)
    assert len(caught.value.violations) == 21
    assert "10 more bad lines" in caught.value.violations[-1]
    with pytest.raises(DataError, match="no lines"):
        jsonl(tmp_path, "")
    with pytest.raises(DataError, match="No such file"):
        build(EnvironmentConfig(kind="jsonl", path=str(tmp_path / "absent")), "train")


def test_jsonl_refuses_to_grade_where_signals_do_not_work(tmp_path):
    environment = jsonl(tmp_path, records(("a", 1)))
    caught = []

    def grade():
        try:
            environment.grade(0, "1", True)
        except RuntimeError as error:
            caught.append(str(error))

    thread = threading.Thread(target=grade)
    thread.start()
    thread.join(10.0)
    assert "main thread" in caught[0]
    assert environment.grade(0, "1", True) == 1.0


TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(params=[TEMPLATE, None], ids=["template", "plain"])
def tokenizer(request, tmp_path):
    letters = {character: index for index, character in enumerate("abcdefghijklmnopqrstuvwxyz ")}
    core = Tokenizer(models.BPE(vocab=letters, merges=[]))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()  # without one, tokens are joined with spaces
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|end|>")
    made.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>"]})
    made.chat_template = request.param
    made.save_pretrained(tmp_path)
    return prompts.load_tokenizer(tmp_path)


def test_prompt_uses_the_chat_template_where_there_is_one(tokenizer):
    tokens = prompts.encode_prompt(tokenizer, "ab", max_prompt_tokens=5)
    named = tokenizer.convert_ids_to_tokens(tokens)
    expected = ["<|user|>", "a", "b", "<|end|>", "<|assistant|>"] if tokenizer.chat_template else ["a", "b"]
    assert named == expected


def test_prompts_that_do_not_fit_are_refused(tokenizer):
    limit = len(prompts.encode_prompt(tokenizer, "abc", 10))
    assert prompts.encode_prompt(tokenizer, "abc", limit)
    with pytest.raises(ValueError, match=f"rollout.max_prompt_tokens = {limit - 1}: .* has {limit} tokens"):
        prompts.encode_prompt(tokenizer, "abc", limit - 1)


def test_only_a_last_end_token_finishes_and_is_dropped(tokenizer):
    end = tokenizer.eos_token_id
    a, b, user = tokenizer.convert_tokens_to_ids(["a", "b", "<|user|>"])
    assert prompts.decode_response(tokenizer, [a, b, end], {end}) == ("ab", True)
    assert prompts.decode_response(tokenizer, [a, b], {end}) == ("ab", False)
    assert prompts.decode_response(tokenizer, [], {end}) == ("", False)
    text, finished = prompts.decode_response(tokenizer, [a, user, b, end], {end})
    assert (text, finished) == ("a<|user|>b", True)


def test_modules_are_light_to_import():
    code = (
        "import sys, megatron_rlzero.environments.reasoning_gym, megatron_rlzero.environments.jsonl;"
        "import megatron_rlzero.environments.prompts, megatron_rlzero.validation;"
        "print([m for m in ('torch', 'vllm', 'megatron', 'transformers', 'reasoning_gym') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
