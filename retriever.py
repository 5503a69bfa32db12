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
import sys
import time
import unicodedata
import urllib.request
from functools import lru_cache
from http.client import HTTPException
from pathlib import Path

import numpy as np
import torch
import transformers
from rank_bm25 import BM25Okapi
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, HfArgumentParser, PreTrainedTokenizerFast


class InputError(ValueError):
    """Something the user gave is unusable; the message says what and how to mend it. Exit code 2."""


class RetrieverError(RuntimeError):
    """The retrieval server cannot be used; the message names its address and the cause."""


# ====================================================================================================== files
READABLE = (".jsonl", ".json", ".parquet")                            # the first two also as .gz


def read_rows(path: str, option: str):
    """(number, place, object) of each row of a local file: JSON lines, a JSON array of objects, or parquet.

    Raises InputError that names option, file and place for whatever cannot be read.
    """
    name = Path(path).name.lower()
    suffix = Path(name.removesuffix(".gz")).suffix
    if not Path(path).is_file():
        wrong = "this is a folder" if Path(path).is_dir() else "there is no such file"
        raise InputError(f"{option} {path}: {wrong}")
    if suffix not in READABLE:
        raise InputError(f"{option} {path}: cannot read {suffix or 'a file without suffix'}, only "
                         f"{', '.join(READABLE)}, the first two also as .gz")
    if suffix == ".parquet":
        from datasets import load_dataset
        from datasets.exceptions import DatasetGenerationError
        try:
            rows = load_dataset("parquet", data_files=str(path), split="train")
        except (ValueError, DatasetGenerationError) as error:
            cause = str(error).splitlines()[0]
            raise InputError(f"{option} {path} is not a readable parquet file: {cause}") from None
        yield from ((n, f"{path}, row {n + 1}", row) for n, row in enumerate(rows))
        return
    try:
        with (gzip.open if name.endswith(".gz") else open)(path, "rt", encoding="utf-8-sig") as lines:
            first = next((line for line in lines if line.strip()), "")
            is_array = first.lstrip().startswith("[")
            rows = json.loads(first + lines.read()) if is_array else ()
            lines.seek(0)
            for n, row in enumerate(rows if is_array else lines):
                if is_array or row.strip():
                    row = row if is_array else json_or_none(row)
                    place = f"{path}, {'item' if is_array else 'line'} {n + 1}"
                    if not isinstance(row, dict):
                        raise InputError(f"{option} {place} is not a JSON object")
                    yield n, place, row
    except json.JSONDecodeError as error:
        raise InputError(f"{option} {path} begins like a JSON array but is none: {error}") from None
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise InputError(f"{option} {path} is not a whole UTF-8 text file (or its gzip): {error}") from None


def json_or_none(text: str):
    """What a JSON text means, None if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def first_of(row: dict, names: tuple):
    """The value of the first of these fields that is there and not null."""
    return next((row[name] for name in names if row.get(name) is not None), None)


# =================================================================================================== passages
def tokenize(text: str) -> list[str]:
    """Lower-case words of `text`; accents stay, in composed form: both spellings of "é" are one word."""
    return re.findall(r"\w+", unicodedata.normalize("NFC", text).lower())


def as_passage(row: dict, where: str, number: int = 0) -> dict:
    """{"id", "title", "text"} from {"contents": '"Title"\\ntext'} (Search-R1) or {"title", "text"} (BEIR).

    A title field beside contents counts; the id is "id" or "_id", else the number. Raises InputError.
    """
    row = row if isinstance(row, dict) else {}
    title, text = row.get("title") or "", first_of(row, ("contents", "text"))
    if not isinstance(title, str) or not isinstance(text, str):
        raise InputError(f'{where}: a passage needs "contents", or "title" and "text", all texts; '
                         f"it has {', '.join(map(str, row)) or 'nothing'}")
    if row.get("contents") is not None:
        head, newline, body = text.partition("\n")
        head = head.strip().strip('"')
        if newline and title in ("", head):
            title, text = head, body
    name = first_of(row, ("id", "_id"))
    return {"id": str(number if name is None else name), "title": title.strip(), "text": text.strip()}


def load_corpus(path: str, option: str = "--corpus") -> list[dict]:
    """The passages of a file that read_rows reads, as as_passage gives them.

    Raises InputError that names the place of an unusable passage, or the file when it holds none.
    """
    passages = [as_passage(row, f"{option} {place}", n) for n, place, row in read_rows(path, option)]
    if not passages:
        raise InputError(f"{option} {path}: the corpus holds no passage")
    return passages


def hotpotqa_corpus(rows) -> list[dict]:
    """The context paragraphs of HotpotQA rows (hub set hotpotqa/hotpot_qa), each title once."""
    texts = {title: "".join(sentences).strip() for row in rows
             for title, sentences in zip(row["context"]["title"], row["context"]["sentences"])}
    return [{"id": str(i), "title": title, "text": text} for i, (title, text) in enumerate(texts.items())]


def check_search(queries, topk: int) -> None:
    """Raises ValueError for a query that is no list of texts, or for topk < 1."""
    if isinstance(queries, str) or not all(isinstance(query, str) for query in queries):
        raise InputError(f"search takes a list of texts, not {queries!r:.60}")
    if topk < 1:
        raise ValueError(f"topk must be at least 1, not {topk}")


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
        if not all(isinstance(p, dict) and {"id", "title", "text"} <= set(p) for p in passages):
            raise InputError('BM25Retriever takes passages [{"id", "title", "text"}, ...], as of load_corpus')
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
        check_search(queries, topk)
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
        check_search(queries, topk)
        if not queries:
            return []
        body = json.dumps({"queries": queries, "topk": topk, "return_scores": True}).encode()
        for attempt in range(self.tries):
            if attempt:
                time.sleep(self.pause * 2 ** (attempt - 1))
            try:
                request = urllib.request.Request(self.url, body, {"Content-Type": "application/json"})
                with urllib.request.urlopen(request, timeout=self.timeout) as reply:
                    return self._parse(json.load(reply), len(queries), topk)
            except InputError as error:
                cause = str(error)
            except (OSError, HTTPException, ValueError) as error:
                cause = f"{type(error).__name__}: {error}"
        raise RetrieverError(f"the retrieval server {self.url} failed {self.tries} times, last with {cause}; "
                             "start it or correct --retriever-url")

    @staticmethod
    def _parse(reply, count, topk):
        result = reply.get("result") if isinstance(reply, dict) else None
        if not isinstance(result, list) or not all(isinstance(passages, list) for passages in result):
            raise InputError('an answer without {"result": [[passage, ..], ..]}')
        if len(result) != count:
            raise InputError(f"{len(result)} result lists for {count} queries")
        found = []
        for passages in result:
            found.append([])
            for passage in passages[:topk]:
                outer = passage if isinstance(passage, dict) else {}
                score = outer.get("score", 0.0)
                if isinstance(score, bool) or not isinstance(score, (int, float)):
                    raise InputError(f"a passage whose score is {score!r}, not a number")
                document = as_passage(outer.get("document", outer), "an unusable answer")
                if first_of(outer.get("document", outer), ("id", "_id")) is None:
                    document["id"] = document["title"] + document["text"]      # two alike are one passage
                found[-1].append({**document, "score": float(score)})
        return found


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
GOLD = ("golden_answers", "answer", "answers")                        # fields of a question's row
SPELLINGS = ("value", "aliases", "normalized_value", "normalized_aliases",     # TriviaQA's dictionary
             "text",                                                  # SQuAD's
             "ground_truth", "target")                                # Search-R1's reward_model


def gold_texts(value, where: str) -> list[str]:
    """All spellings of a gold answer: a text, a number, a list of them, or a dictionary with SPELLINGS.

    Raises InputError for what is none of these: a wrong gold answer would silently train the wrong thing.
    """
    value = value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value
    if isinstance(value, str):                                        # PopQA: a JSON list inside a text
        inner = json_or_none(value) if value.strip()[:1] in ("[", "{") else None
        return gold_texts(inner, where) if inner else [value.strip()]
    if isinstance(value, dict):
        names = [name for name in SPELLINGS if value.get(name) is not None]
        if not names:
            raise InputError(f"{where}: no gold answer is known among {', '.join(map(str, value))}")
        return gold_texts([value[name] for name in names], where)
    if isinstance(value, (list, tuple)):
        return [text for item in value for text in gold_texts(item, where)]
    if value is None:
        return []
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InputError(f"{where}: the gold answer {value!r} is neither a text nor a number")
    return [str(int(value) if value == int(value) else value)]


def as_question(row: dict, where: str) -> dict:
    """{"id", "question", "golden_answers"} from a row: the question's text and the first field of GOLD there.

    Without one, Search-R1's reward_model.ground_truth.target. Raises InputError if nothing could ever match.
    """
    question, gold = row.get("question"), first_of(row, (*GOLD, "reward_model"))
    golds = list(dict.fromkeys(text for text in gold_texts(gold, where) if text.strip()))
    if not isinstance(question, str) or not question.strip() or not golds:
        has = ", ".join(map(str, row)) or "nothing"
        raise InputError(f"{where} needs a question and a gold answer that is not empty ({', '.join(GOLD)}); "
                         f"it has {has}")
    name = first_of(row, ("id", "_id"))
    return {"id": str(where if name is None else name), "question": question.strip(), "golden_answers": golds}


def split_names(spec: str) -> list[str]:
    """The parts of "a+b"; a + inside the path of a file that exists divides nothing."""
    pieces, names = spec.split("+"), []
    while pieces:
        n = next((n for n in range(len(pieces), 1, -1) if Path("+".join(pieces[:n])).exists()), 1)
        names.append("+".join(pieces[:n]))
        pieces = pieces[n:]
    return names


def load_questions(spec: str, splits=("train",), option: str = "--data") -> list[dict]:
    """Questions of hub sets ("nq+hotpotqa", the first of `splits` there) or files ("a.jsonl+b.parquet").

    A name that exists, or has a suffix or a folder in it, is a file. Raises InputError that names the option.
    """
    names = split_names(spec)
    local = [name for name in names if not name or Path(name).exists() or Path(name).suffix or "/" in name]
    missing = [name for name in local if not Path(name).exists()]
    if missing:
        raise InputError(f"{option} {spec}: there is no such file as {missing[0] or spec}")
    questions = []
    for name in names:
        rows = read_rows(name, option) if name in local else hub_rows(name, splits, option)
        questions += [as_question(row, f"{option} {place}") for _, place, row in rows]
    if not questions:
        raise InputError(f"{option} {spec} holds no question")
    return questions


def hub_rows(name: str, splits, option: str):
    """(number, place, row) of a set of FlashRAG's collection on the hub: id, question, golden_answers."""
    from datasets import load_dataset
    try:
        sets = load_dataset("RUC-NLPIR/FlashRAG_datasets", name)
    except ValueError as error:                                       # no such set in the collection
        raise InputError(f"{option} {name}: {str(error).splitlines()[0]}") from None
    split = next((s for s in splits if s in sets), None)
    if split is None:
        wanted, there = " or ".join(splits), ", ".join(sets)
        raise InputError(f"{option} {name}: the hub set has no {wanted} split, only {there}")
    return ((n, f"{name} {split}, row {n + 1}", row) for n, row in enumerate(sets[split]))


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


def cannot_load(what: str, model: str, error: Exception) -> InputError:
    """An InputError in one sentence; for a run's checkpoint it names the one before it."""
    cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
    folder, before = Path(model), []
    if folder.name.startswith("checkpoint-"):
        before = [c for c in checkpoints(folder.parent) if c != folder and (c / "trainer.pt").is_file()]
    hint = f"; remove {folder} to continue from {before[-1].name}" if before else ""
    return InputError(f"cannot load the {what} {model}: {cause}{hint}")


def on_hub(model: str) -> None:
    """Raises InputError at once for a model that is neither a folder, nor cached, nor on the hub."""
    from huggingface_hub import HfApi, try_to_load_from_cache
    try:
        if not Path(model).is_dir() and not isinstance(try_to_load_from_cache(model, "config.json"), str):
            HfApi().model_info(model, timeout=10)
    except Exception as error:                     # an illegal name, an unknown one, no network
        reason = InputError(f"it is no folder, and the hub says: {error}")
        raise cannot_load("model", model, reason) from None


def load_policy(model: str, device, trainable=True, tokens: int = 0):
    """A causal language model, float32 and without dropout: old and new log-probabilities must agree exactly.

    Raises InputError for one that is missing, damaged, of another kind, or has less than `tokens` positions.
    """
    model = hub_name(model)
    on_hub(model)
    try:
        config = AutoConfig.from_pretrained(model)
        for key, value in vars(config).items():
            if "drop" in key and isinstance(value, float):
                setattr(config, key, 0.0)
        policy, report = AutoModelForCausalLM.from_pretrained(model, config=config, dtype=torch.float32,
                                                              use_safetensors=True, output_loading_info=True)
    except Exception as error:                      # whatever the library raises, the checkpoint is the cause
        raise cannot_load("model", model, error) from None
    wrong = [*report["missing_keys"], *report["mismatched_keys"]]
    if wrong:
        first = InputError(f"{len(wrong)} weights do not fit its config, the first is {wrong[0]}")
        raise cannot_load("model", model, first)
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    if tokens > positions:
        raise InputError(f"--max-total-tokens {tokens} exceeds the {positions} positions of {model}: lower it")
    return policy.to(device).requires_grad_(trainable)


def load_tokenizer(model: str):
    """tokenizer.json as it is written; AutoTokenizer would rebuild its rules from the architecture."""
    model = hub_name(model)
    on_hub(model)
    try:
        return PreTrainedTokenizerFast.from_pretrained(model)
    except Exception as error:                      # as above
        raise cannot_load("tokenizer of", model, error) from None


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
    """The settings of a run. Raises InputError for a file that does not hold them."""
    try:
        return kind(**json.loads((Path(run) / "config.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"{run}/config.json does not hold the settings of a run: {error}") from None


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


def open_run(out: Path, start: Path | None, cfg, optimizer, generator, probe: list) -> int:
    """Make or reopen the files of a run; restore the state from `start`. Returns the first step."""
    first = 0
    if start:
        try:
            state = torch.load(start / "trainer.pt", weights_only=True, map_location="cpu")
            optimizer.load_state_dict(state["optimizer"])
            generator.set_state(state["generator"])
            probe += state["probe"]
            first = state["step"]
        except Exception as error:                  # whatever torch raises, the checkpoint is the cause
            raise cannot_load("optimiser of", str(start), error) from None
    out.mkdir(parents=True, exist_ok=True)
    (out / "config.tmp").write_text(json.dumps(dataclasses.asdict(cfg), indent=1), encoding="utf-8")
    os.replace(out / "config.tmp", out / "config.json")
    with open(out / "metrics.jsonl", "ab+") as log:                # steps after the checkpoint are made again
        log.seek(0)
        log.truncate(sum(map(len, log.readlines()[:first])))
    return first


def save_checkpoint(out: Path, step: int, policy, tokenizer, optimizer, generator, probe: list) -> None:
    """out/checkpoint-STEP: the policy in the Hugging Face layout, and trainer.pt (optimiser, step, RNG).

    Written under a temporary name and renamed, so that a checkpoint is whole or absent. trainer.pt, twice the
    size of the weights, is kept in the two newest only.
    """
    folder, temporary = out / f"checkpoint-{step}", out / "checkpoint.tmp"
    state = {"step": step, "optimizer": optimizer.state_dict(), "generator": generator.get_state(),
             "probe": probe}
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


def summary(run: Path) -> str:
    """The end of a run in three lines."""
    rewards = [row["reward"] for row in read_metrics(run)]
    return (f"reward {mean(rewards[:10]):.3f} in the first ten steps, {mean(rewards[-10:]):.3f} in the last\n"
            f"files: {run}/metrics.jsonl, config.json, {checkpoints(run)[-1].name}\n"
            f"next: python eval.py {run}")


def exit_code(program) -> int:
    """Run a program: 0, 130 after Ctrl-C, or 2 after bad input, which is one sentence on stderr."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        program()
    except (InputError, RetrieverError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def mean(values) -> float | None:
    """Mean of a list of numbers; None (null in metrics.jsonl) where there is nothing to average."""
    return sum(values) / len(values) if values else None
