"""What the search agent gets from outside: passages and search, questions, models, settings, run folders.

    load_corpus, BM25Retriever, HTTPRetriever   passages and the two ways to search them
    encode_prompt, encode_feedback              question and passages as the policy reads them: x, o_t
    load_questions, exact_match                 questions with gold answers, and the reward r_i of Sec. 3
    load_task, questions_of_step                the questions and the search engine of a run, and their order
    load_policy, load_tokenizer, resolve        a model from a folder or the hub
    parse_args, check                           the command line, and what a setting may be
    open_run, save_checkpoint, read_metrics     the files of a run

Both search engines have one method, search(queries, topk): for each query a list of passages {"id", "title",
"text", "score"}, best first.
"""
import dataclasses
import gzip
import json
import math
import os
import re
import shutil
import string
import time
import unicodedata
import urllib.request
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from rank_bm25 import BM25Okapi
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, PreTrainedTokenizerFast


class InputError(ValueError):
    """Something the user gave is unusable; the message says what and how to mend it. Exit code 2."""


class RetrieverError(RuntimeError):
    """The retrieval server cannot be used; the message names its address and the cause."""


# =================================================================================================== passages
def tokenize(text: str) -> list[str]:
    """Lower-case words of `text`; accents stay, in composed form: both spellings of "é" are one word."""
    return re.findall(r"\w+", unicodedata.normalize("NFC", text).lower())


def split_contents(contents: str) -> tuple[str, str]:
    """Search-R1's passage text, '"Title"\\ntext', as (title, text). Without a line break it is all text."""
    title, newline, text = contents.partition("\n")
    return (title.strip().strip('"'), text.strip()) if newline else ("", contents.strip())


def read_jsonl(path):
    """(line number, object) of each line of a .jsonl or .jsonl.gz file. InputError names file and line."""
    try:
        with (gzip.open if str(path).endswith(".gz") else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    try:
                        row = json.loads(line)
                    except ValueError:
                        row = None
                    if not isinstance(row, dict):
                        raise InputError(f"{path}, line {number} is not a JSON object")
                    yield number, row
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise InputError(f"{path} is not a whole UTF-8 text file (or its gzip): {error}") from None


def load_corpus(path: str) -> list[dict]:
    """Passages {"id", "title", "text"} from a .jsonl(.gz) file of {"id", "contents": "\\"Title\\"\\ntext"}.

    Raises InputError that names the file and line of an unusable passage, or the file when it holds none.
    """
    passages = []
    for number, row in read_jsonl(path):
        if not isinstance(row.get("contents"), str):
            raise InputError(f'{path}, line {number}: a passage must be {{"id", "contents"}}, both texts')
        title, text = split_contents(row["contents"])
        passages.append({"id": str(row.get("id", number - 1)), "title": title, "text": text})
    if not passages:
        raise InputError(f"{path}: the corpus holds no passage")
    return passages


def hotpotqa_corpus(rows) -> list[dict]:
    """The context paragraphs of HotpotQA rows (hub set hotpotqa/hotpot_qa), each title once."""
    texts = {title: "".join(sentences).strip() for row in rows
             for title, sentences in zip(row["context"]["title"], row["context"]["sentences"])}
    return [{"id": str(i), "title": title, "text": text} for i, (title, text) in enumerate(texts.items())]


class LuceneBM25(BM25Okapi):
    """BM25Okapi with Lucene's idf, ln(1 + (N - n + 0.5) / (n + 0.5)), which is never negative.

    Okapi's own idf is 0 for a word in half of the passages and below 0 for a more frequent one: in a small
    corpus the only right passage can score 0. Search-R1's BM25 index (Pyserini, Lucene) uses this form too.
    """

    def _calc_idf(self, nd):
        self.idf = {word: math.log(1 + (self.corpus_size - n + 0.5) / (n + 0.5)) for word, n in nd.items()}


class BM25Retriever:
    """BM25 over passages {"id", "title", "text"}; title and text are both indexed.

    rank_bm25 walks the whole corpus for each query word. Here its own statistics are turned into postings
    once: for each word the passages that hold it and what it adds to their score; a query reads only those.
    Raises InputError for a corpus without any passage.
    """

    def __init__(self, passages: list[dict]):
        if not passages:
            raise InputError("BM25Retriever needs at least one passage, the corpus is empty")
        self.passages = passages
        words = [tokenize(f"{p['title']} {p['text']}") for p in passages]
        self.word_index = {}
        if not any(words):                                       # nothing to index: every search is empty
            return
        bm25 = LuceneBM25(words)
        self.word_index = {word: i for i, word in enumerate(bm25.idf)}
        idf = np.fromiter(bm25.idf.values(), float)                                               # (V,)
        norm = bm25.k1 * (1 - bm25.b + bm25.b * np.array(bm25.doc_len) / bm25.avgdl)              # (N,)
        # one entry per word and passage
        word = np.fromiter((self.word_index[w] for doc in bm25.doc_freqs for w in doc), np.int32)
        tf = np.fromiter((count for doc in bm25.doc_freqs for count in doc.values()), np.int32)
        doc = np.repeat(np.arange(len(passages), dtype=np.int32), [len(doc) for doc in bm25.doc_freqs])
        order = np.argsort(word, kind="stable")                         # by word, then in corpus order
        word, tf, self.holders = word[order], tf[order], doc[order]
        self.gains = idf[word] * (tf * (bm25.k1 + 1) / (tf + norm[self.holders]))    # BM25Okapi.get_scores
        self.bounds = np.append(0, np.bincount(word).cumsum())                       # (V + 1,) a word's slice

    def search(self, queries: list[str], topk: int = 3) -> list[list[dict]]:
        """The topk passages that hold at least one word of each query, best first, ties in corpus order.

        A query without a known word gets []. Raises ValueError for topk < 1.
        """
        if topk < 1:
            raise ValueError(f"topk must be at least 1, not {topk}")
        return [self._search(query, topk) for query in queries]

    def _search(self, query, topk):
        known = [self.word_index[word] for word in tokenize(query) if word in self.word_index]
        if not known:
            return []
        scores = np.zeros(len(self.passages))                                                     # (N,)
        for i in known:
            posting = slice(self.bounds[i], self.bounds[i + 1])
            scores[self.holders[posting]] += self.gains[posting]
        k = min(topk, len(scores))
        kth = np.partition(scores, -k)[-k]                    # every idf is above 0, so a hit's score is too
        best = np.flatnonzero(scores >= kth if kth > 0 else scores > 0)
        best = best[np.argsort(-scores[best], kind="stable")][:k]
        return [{**self.passages[i], "score": float(scores[i])} for i in best]


class HTTPRetriever:
    """Client of Search-R1's retrieval server.

    It POSTs {"queries", "topk", "return_scores"} and reads {"result": [[passage, ..], ..]}; a passage is
    {"document": {"id", "contents"}, "score"}, or the bare document. Each call has a time limit and is tried
    `tries` times with a growing pause; then RetrieverError names the address and the cause. A server that
    fails must never look like a search without results: the policy would be trained on it.
    """

    def __init__(self, url: str, timeout: float = 30.0, tries: int = 3, pause: float = 1.0):
        self.url, self.timeout, self.tries, self.pause = url, timeout, tries, pause

    def search(self, queries: list[str], topk: int = 3) -> list[list[dict]]:
        if not queries:
            return []
        body = json.dumps({"queries": queries, "topk": topk, "return_scores": True}).encode()
        for attempt in range(self.tries):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    result = json.load(reply)["result"]
                if len(result) != len(queries):
                    raise ValueError(f"{len(result)} result lists for {len(queries)} queries")
                return [[self._passage(p) for p in passages[:topk]] for passages in result]
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                cause = f"{type(error).__name__}: {error}"
        raise RetrieverError(f"the retrieval server {self.url} failed {self.tries} times, last with {cause}; "
                           "start it or correct --retriever-url")

    @staticmethod
    def _passage(passage):
        document = passage.get("document", passage)
        title, text = split_contents(document["contents"])
        return {"id": str(document.get("id", document["contents"])), "title": title, "text": text,
                "score": float(passage.get("score", 0.0))}


# ====================================================================================== what the policy reads
INVALID = "\nInvalid action. Use <search> query </search> to search or <answer> answer </answer> to finish.\n"
TAG = re.compile(r"</?(?:think|search|information|answer)>")


@lru_cache
def control_text(tokenizer) -> re.Pattern:
    """Matches protocol tags and the tokenizer's added (special) tokens."""
    added = sorted(tokenizer.get_added_vocab(), key=len, reverse=True)
    return re.compile("|".join([TAG.pattern, *map(re.escape, added)]))


def plain(text: str, tokenizer) -> str:
    """`text` (a question, a passage) made harmless: no protocol tag, no special token, encodable characters.

    Retrieved text can then neither close the information block nor become a control token. A tag or token is
    replaced by its letters between spaces, so that no new one can form around the gap.
    """
    text = text.encode("utf-8", "replace").decode("utf-8")
    letters = lambda match: f" {re.sub(r'[^a-z]+', ' ', match.group().lower()).strip()} "
    return control_text(tokenizer).sub(letters, text)


def encode_prompt(question: str, tokenizer, cfg) -> list[int]:
    """Token ids of the prompt x: the chat template for instruct models, the bare text for base models.

    Raises InputError where it leaves no room for an action.
    """
    question = plain(question, tokenizer)
    question_ids = tokenizer.encode(question, add_special_tokens=False)
    if len(question_ids) > cfg.max_feedback_tokens:        # [ours] an over-long question keeps its beginning
        question = tokenizer.decode(question_ids[:cfg.max_feedback_tokens])
    text = cfg.prompt.replace("{question}", question)
    if cfg.chat == "yes":
        chat = [{"role": "user", "content": text}]
        text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    ids = tokenizer.encode(text, add_special_tokens=cfg.chat != "yes")
    if len(ids) >= cfg.max_total_tokens:
        raise InputError(f"--max-total-tokens {cfg.max_total_tokens} has no room for an action: "
                         f"a prompt takes {len(ids)} tokens")
    return ids


def encode_feedback(passages: list[dict] | None, tokenizer, limit: int) -> list[int]:
    """Token ids of o_t: the <information> block, at most `limit`; passages None: no valid action.

    The tail of the block is cut, its closing tag never is. It is encoded on its own and appended to the ids
    that were sampled; nothing sampled is tokenised again.
    """
    encode = lambda part: tokenizer.encode(part, add_special_tokens=False)
    if passages is None:
        return encode(INVALID)
    clean = lambda text: plain(text, tokenizer)
    text = "\n".join(f"Doc {n} (Title: {clean(p['title'])}) {clean(p['text'][:20 * limit])}"
                     for n, p in enumerate(passages, 1)) or "No passage found."
    opening, body, closing = encode("\n\n<information>"), encode(text), encode("</information>\n\n")
    room = limit - len(opening) - len(closing)
    if room < 1:
        raise InputError(f"--max-feedback-tokens {limit} has no room for text: the tags take {limit - room}")
    if len(body) > room:
        body = body[:room]
        while body and tokenizer.decode(body).endswith("\ufffd"):           # never end within a character
            body.pop()
    return opening + body + closing


# ========================================================================================== questions, reward
def as_question(row: dict, where: str) -> dict:
    """{"id", "question", "golden_answers"}; the row's: a list, an array, a text or a JSON list in one."""
    question, golds = row.get("question"), row.get("golden_answers", row.get("answer"))
    if isinstance(golds, str):
        try:                                                  # PopQA's form: a JSON list inside a string
            parsed = json.loads(golds)
        except ValueError:
            parsed = None
        golds = parsed if isinstance(parsed, list) else [golds]
    golds = [] if golds is None else list(golds)
    golds = [str(gold) for gold in golds if gold is not None]
    if not isinstance(question, str) or not question.strip() or not golds:
        has = ", ".join(map(str, row)) or "nothing"
        raise InputError(f"{where} needs a question and golden_answers; it has {has}")
    return {"id": str(row.get("id", where)), "question": question.strip(), "golden_answers": golds}


def load_questions(spec: str, splits=("train",)) -> list[dict]:
    """Questions of hub sets ("nq+hotpotqa", the first of `splits` there) or files ("a.jsonl+b.parquet")."""
    questions = []
    for name in spec.split("+"):
        if Path(name).suffix in (".jsonl", ".json", ".parquet"):
            if not Path(name).is_file():
                raise InputError(f"--data {name}: there is no such file")
            if name.endswith(".parquet"):
                from datasets import load_dataset
                from datasets.exceptions import DatasetGenerationError
                try:
                    rows = enumerate(load_dataset("parquet", data_files=name, split="train"), 1)
                except (ValueError, DatasetGenerationError) as error:
                    cause = str(error).splitlines()[0]
                    raise InputError(f"--data {name} is not a readable parquet file: {cause}") from None
            else:
                rows = read_jsonl(name)
            questions += [as_question(row, f"{name}, line {number}") for number, row in rows]
        else:                                   # FlashRAG's collection: id, question, golden_answers per set
            from datasets import load_dataset
            try:
                sets = load_dataset("RUC-NLPIR/FlashRAG_datasets", name)
            except ValueError as error:                    # no such set in the collection
                raise InputError(f"--data {name}: {str(error).splitlines()[0]}") from None
            split = next((s for s in splits if s in sets), None)
            if split is None:
                wanted, there = " or ".join(splits), ", ".join(sets)
                raise InputError(f"--data {name}: the hub set has no {wanted} split, only {there}")
            rows = enumerate(sets[split], 1)
            questions += [as_question(row, f"{name} {split}, row {number}") for number, row in rows]
    if not questions:
        raise InputError(f"--data {spec} holds no question")
    return questions


def load_hotpotqa(count: int, seed: int, split="train") -> tuple[list[dict], list[dict]]:
    """`count` HotpotQA questions, drawn by `seed`, and the paragraphs that come with them."""
    from datasets import load_dataset
    rows = load_dataset("hotpotqa/hotpot_qa", "distractor")[split].shuffle(seed=seed)
    rows = rows.select(range(min(count, len(rows))))
    return [as_question(row, f"hotpot_qa, row {n}") for n, row in enumerate(rows, 1)], hotpotqa_corpus(rows)


def load_task(cfg) -> tuple[list[dict], object]:
    """The training questions and the search engine of a run."""
    if cfg.data == "hotpotqa" and not cfg.corpus and not cfg.retriever_url:
        questions, passages = load_hotpotqa(cfg.hotpotqa_questions, cfg.seed)
        return questions, BM25Retriever(passages)
    return load_questions(cfg.data), load_retriever(cfg)


def load_retriever(cfg):
    """The search engine that --corpus or --retriever-url names."""
    if cfg.retriever_url:
        return HTTPRetriever(cfg.retriever_url)
    if not cfg.corpus:
        raise InputError(f"--data {cfg.data} brings no passages: give --corpus FILE or --retriever-url URL")
    if not Path(cfg.corpus).is_file():
        raise InputError(f"--corpus {cfg.corpus}: there is no such file")
    return BM25Retriever(load_corpus(cfg.corpus))


def questions_of_step(questions: list[dict], step: int, cfg) -> list[dict]:
    """The P questions of a step: a seeded shuffle per epoch, by the step alone; resuming needs no state."""
    shuffled = lambda epoch: torch.Generator().manual_seed(cfg.seed * 100_003 + epoch)
    numbers = range(step * cfg.questions_per_step, (step + 1) * cfg.questions_per_step)
    orders = {epoch: torch.randperm(len(questions), generator=shuffled(epoch))
              for epoch in {n // len(questions) for n in numbers}}
    return [questions[orders[n // len(questions)][n % len(questions)]] for n in numbers]


def normalize_answer(text: str) -> str:
    """SQuAD normalisation: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(answer: str | None, golden_answers: list[str]) -> float:
    """The reward r_i of Sec. 3: 1.0 if the answer equals any gold answer after normalisation, else 0.0.

    Where normalisation leaves nothing of the answer ("The The"), the lower-case text itself is compared.
    """
    if answer is None or not answer.strip():
        return 0.0
    form = lambda text: normalize_answer(text) or text.lower().strip()
    return float(any(form(answer) == form(gold) for gold in golden_answers))


# ===================================================================================================== models
def hub_name(model: str) -> str:
    """Qwen2.5-0.5B -> Qwen/Qwen2.5-0.5B; a folder or a full hub name stays as it is."""
    short = model.startswith("Qwen") and "/" not in model and not Path(model).is_dir()
    return f"Qwen/{model}" if short else model


def load_policy(model: str, device, trainable=True):
    """A causal language model, float32 and without dropout: old and new log-probabilities must agree exactly.

    Raises InputError for a checkpoint that is missing, damaged or not a causal language model.
    """
    model = hub_name(model)
    try:
        config = AutoConfig.from_pretrained(model)
        for key, value in vars(config).items():
            if "drop" in key and isinstance(value, float):
                setattr(config, key, 0.0)
        policy, report = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32,
                                                              use_safetensors=True, output_loading_info=True)
    except Exception as error:                      # whatever the library raises, the checkpoint is the cause
        raise InputError(f"cannot load the model {model}: {str(error).strip().splitlines()[0]}") from None
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if wrong:
        raise InputError(f"cannot load the model {model}: {len(wrong)} weights do not fit its config, "
                         f"the first is {wrong[0]}")
    return policy.to(device).requires_grad_(trainable)


def load_tokenizer(model: str):
    """tokenizer.json as it is written; AutoTokenizer would rebuild its rules from the architecture."""
    try:
        return PreTrainedTokenizerFast.from_pretrained(hub_name(model))
    except Exception as error:                      # as above
        cause = str(error).strip().splitlines()[0]
        raise InputError(f"cannot load the tokenizer of {hub_name(model)}: {cause}") from None


def autocast(device):
    """bf16 compute on a GPU. The weights stay float32, since bf16 ones would swallow Adam steps of 1e-6."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def resolve(cfg, tokenizer) -> torch.device:
    """The device; and cfg.chat settled to yes or no."""
    if cfg.device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no CUDA device; use --device cpu")
    if cfg.chat == "auto":
        cfg.chat = "yes" if "instruct" in cfg.model.lower() else "no"
    if not tokenizer.chat_template:
        cfg.chat = "no"
    return torch.device("cuda" if cfg.device != "cpu" and torch.cuda.is_available() else "cpu")


# ========================================================================================== settings and runs
class Parser(HfArgumentParser):
    """Options from the fields of a dataclass; a wrong command line is reported in one sentence."""

    def error(self, message):
        raise InputError(message.replace("'", "") + "; see --help")


def parse_args(argv, base, small) -> tuple[object, Path | None]:
    """llds_grpo.py's command line: (settings, run folder to resume or None). Without --model, `small`."""
    parser = Parser(type(base), allow_abbrev=False, description="GRPO + LLDS for a search agent.")
    parser.add_argument("--resume", metavar="DIR", help="continue the run in DIR")
    missing = dict.fromkeys(vars(parser.parse_args(argv)), None)    # --help or a wrong command line ends here
    parser.set_defaults(**missing)
    given = {name: value for name, value in vars(parser.parse_args(argv)).items() if value is not None}
    if "resume" not in given:
        return dataclasses.replace(base if "model" in given else small, **given), None
    run = Path(given.pop("resume"))
    changed = sorted(set(given) - {"steps", "save_every", "device"})
    if changed:
        raise InputError("--resume continues the run as it was; only --steps, --save-every and --device may "
                         f"be given with it, not --{changed[0].replace('_', '-')}")
    if not (run / "config.json").is_file():
        raise InputError(f"--resume {run}: there is no run in it (no config.json)")
    return dataclasses.replace(read_config(run, type(base)), **given), run


def read_config(run: Path, kind):
    """The settings of a run."""
    return kind(**json.loads((Path(run) / "config.json").read_text(encoding="utf-8")))


def check(cfg) -> None:
    """Raises InputError for a setting that cannot work."""
    may_be_0 = ("seed", "warmup_steps", "kl_coef", "llds_lambda", "weight_decay")
    for f in dataclasses.fields(cfg):
        value, kind = getattr(cfg, f.name), type(f.default)
        if kind in (int, float):
            least, words = (1, "at least 1") if kind is int else (5e-324, "a number above 0")
            least, words = (0, "at least 0") if f.name in may_be_0 else (least, words)
            if not least <= value < math.inf:
                raise InputError(f"--{f.name.replace('_', '-')} must be {words}, not {value}")
    if cfg.questions_per_step % cfg.updates_per_rollout:
        raise InputError(f"--questions-per-step {cfg.questions_per_step} must be a multiple of "
                         f"--updates-per-rollout {cfg.updates_per_rollout}: a mini-batch holds whole groups")
    if cfg.llds_lambda and cfg.updates_per_rollout == 1:
        raise InputError("--updates-per-rollout must be at least 2: with one, the old and the current policy "
                         "are the same, Delta is 0 and LLDS never acts; or give --llds-lambda 0")
    if "{question}" not in cfg.prompt:
        raise InputError("--prompt must contain {question}")
    if not re.fullmatch(r"adaptive|0?\.\d+|[01](\.0*)?", cfg.answer_beta):
        raise InputError(f"--answer-beta must be a number from 0 to 1 or adaptive, not {cfg.answer_beta!r}")


def run_folder(cfg) -> Path:
    """--out, or a new folder under runs/ that names the model, the objective and the seed."""
    if cfg.out:
        if (Path(cfg.out) / "metrics.jsonl").exists():
            raise InputError(f"--out {cfg.out} already holds a run; continue it with --resume {cfg.out}, "
                             "or choose another folder")
        return Path(cfg.out)
    base = Path("runs") / f"{Path(cfg.model).name}-{cfg.objective}-lambda{cfg.llds_lambda:g}-seed{cfg.seed}"
    candidates = [base, *(base.with_name(f"{base.name}-{n}") for n in range(2, 1000))]
    return next(folder for folder in candidates if not folder.exists())


def checkpoints(run: Path) -> list[Path]:
    """The checkpoint folders of a run, oldest first."""
    return sorted(Path(run).glob("checkpoint-*"), key=lambda folder: int(folder.name.split("-")[1]))


def open_run(out: Path, start: Path | None, cfg, optimizer, generator) -> int:
    """Make or reopen the files of a run; restore optimiser and RNG from `start`. Returns the first step."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.tmp").write_text(json.dumps(dataclasses.asdict(cfg), indent=1), encoding="utf-8")
    os.replace(out / "config.tmp", out / "config.json")
    first = 0
    if start:
        state = torch.load(start / "trainer.pt", weights_only=True, map_location="cpu")
        optimizer.load_state_dict(state["optimizer"])
        generator.set_state(state["generator"])
        first = state["step"]
    with open(out / "metrics.jsonl", "ab+") as log:                # steps after the checkpoint are made again
        log.seek(0)
        log.truncate(sum(map(len, log.readlines()[:first])))
    return first


def save_checkpoint(out: Path, step: int, policy, tokenizer, optimizer, generator) -> None:
    """out/checkpoint-STEP: the policy in the Hugging Face layout, and trainer.pt (optimiser, step, RNG).

    Written under a temporary name and renamed, so that a checkpoint is whole or absent. trainer.pt, twice the
    size of the weights, is kept in the two newest only.
    """
    folder, temporary = out / f"checkpoint-{step}", out / "checkpoint.tmp"
    state = {"step": step, "optimizer": optimizer.state_dict(), "generator": generator.get_state()}
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        policy.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        torch.save(state, temporary / "trainer.pt")
    except (OSError, RuntimeError, SafetensorError) as error:         # a full disk raises any of the three
        raise InputError(f"cannot write {folder}, the checkpoints before it are kept: {error}") from None
    if folder.exists():                                               # left by the run that this one resumes
        shutil.rmtree(folder)
    os.replace(temporary, folder)
    for old in checkpoints(out)[:-2]:
        (old / "trainer.pt").unlink(missing_ok=True)


def read_metrics(run: Path) -> list[dict]:
    """The rows of a run's metrics.jsonl; a last line torn by a crash is left out."""
    text = (Path(run) / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n")[:-1] if line]


def mean(values) -> float | None:
    """Mean of a list of numbers; None (null in metrics.jsonl) where there is nothing to average."""
    return sum(values) / len(values) if values else None
