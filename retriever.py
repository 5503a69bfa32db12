"""The search agent's data: passages, the two ways to search them, and questions.

    load_corpus(path)           passages from a .jsonl or .jsonl.gz file in Search-R1's format
    BM25Retriever(passages)     rank_bm25's Okapi statistics with Lucene's idf, scored through postings
    HTTPRetriever(url)          a client of Search-R1's retrieval server (the paper: E5 over 21 M passages)
    load_questions(spec)        questions with gold answers from hub sets or local files
    load_hotpotqa(count, seed)  HotpotQA's questions together with their own paragraphs, from the hub

Both retrievers have one method, search(queries, topk) -> one list of {"id", "title", "text", "score"} per query, best first.
"""
import gzip
import json
import math
import re
import time
import unicodedata
import urllib.request
from pathlib import Path

import numpy as np
from rank_bm25 import BM25Okapi


class InputError(ValueError):
    """Something the user gave is unusable; the message says what and how to mend it. The programs print it and exit with 2."""


class RetrieverError(RuntimeError):
    """The retrieval server cannot be used; the message names its address and the cause."""


def tokenize(text: str) -> list[str]:
    """Lower-case words of `text`; accents stay, in composed form, so that both spellings of "é" are one word."""
    return re.findall(r"\w+", unicodedata.normalize("NFC", text).lower())


def split_contents(contents: str) -> tuple[str, str]:
    """Search-R1's passage text, '"Title"\\ntext', as (title, text). Without a line break it is all text."""
    title, newline, text = contents.partition("\n")
    return (title.strip().strip('"'), text.strip()) if newline else ("", contents.strip())


def read_jsonl(path):
    """(line number, object) of each line of a .jsonl or .jsonl.gz file. Raises InputError that names file and line."""
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
    """Passages {"id", "title", "text"} from a .jsonl or .jsonl.gz file with lines {"id", "contents": "\\"Title\\"\\ntext"}.

    Raises InputError that names the file and line of an unusable passage, or the file when it holds none.
    """
    passages = []
    for number, row in read_jsonl(path):
        if not isinstance(row.get("contents"), str):
            raise InputError(f'{path}, line {number}: a passage must be {{"id", "contents"}} with a text as its contents')
        title, text = split_contents(row["contents"])
        passages.append({"id": str(row.get("id", number - 1)), "title": title, "text": text})
    if not passages:
        raise InputError(f"{path}: the corpus holds no passage")
    return passages


def hotpotqa_corpus(rows) -> list[dict]:
    """The context paragraphs of HotpotQA rows (hub set hotpotqa/hotpot_qa), each title once, as load_corpus gives them."""
    texts = {title: "".join(sentences).strip() for row in rows
             for title, sentences in zip(row["context"]["title"], row["context"]["sentences"])}
    return [{"id": str(i), "title": title, "text": text} for i, (title, text) in enumerate(texts.items())]


class LuceneBM25(BM25Okapi):
    """BM25Okapi with Lucene's idf, ln(1 + (N - n + 0.5) / (n + 0.5)), which is never negative.

    Okapi's own idf is 0 for a word in half of the passages and below 0 for a more frequent one, so that in a small
    corpus the only right passage can score 0. Search-R1's BM25 index (Pyserini, on Lucene) uses this form too.
    """

    def _calc_idf(self, nd):
        self.idf = {word: math.log(1 + (self.corpus_size - n + 0.5) / (n + 0.5)) for word, n in nd.items()}


class BM25Retriever:
    """BM25 over passages {"id", "title", "text"}; title and text are both indexed.

    rank_bm25 walks the whole corpus for each query word. Here its own statistics are turned into postings once: for each
    word the passages that hold it and what the word adds to their score, so that a query reads only those.
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
        word = np.fromiter((self.word_index[w] for doc in bm25.doc_freqs for w in doc), np.int32)         # one entry per
        tf = np.fromiter((count for doc in bm25.doc_freqs for count in doc.values()), np.int32)           # word and passage
        doc = np.repeat(np.arange(len(passages), dtype=np.int32), [len(doc) for doc in bm25.doc_freqs])
        order = np.argsort(word, kind="stable")                                                   # by word, then corpus order
        word, tf, self.holders = word[order], tf[order], doc[order]
        self.gains = idf[word] * (tf * (bm25.k1 + 1) / (tf + norm[self.holders]))                 # as in BM25Okapi.get_scores
        self.bounds = np.append(0, np.bincount(word).cumsum())                                    # (V + 1,) a word's slice

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
        kth = np.partition(scores, -k)[-k]                       # every idf is above 0, so a hit's score is too
        best = np.flatnonzero(scores >= kth if kth > 0 else scores > 0)
        best = best[np.argsort(-scores[best], kind="stable")][:k]
        return [{**self.passages[i], "score": float(scores[i])} for i in best]


class HTTPRetriever:
    """Client of Search-R1's retrieval server: POST {"queries", "topk", "return_scores"} -> {"result": [[passage, ..], ..]}.

    A passage is {"document": {"id", "contents"}, "score"}, or the bare document. Each call has a time limit and is tried
    `tries` times with a growing pause; then RetrieverError names the address and the cause. A server that fails must never
    look like a search without results: the policy would be trained on it.
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


# ============================================================================================================ questions

def as_question(row: dict, where: str) -> dict:
    """{"id", "question", "golden_answers"} from a row whose answers are a list, an array, a string or a JSON list in a string."""
    question, golds = row.get("question"), row.get("golden_answers", row.get("answer"))
    if isinstance(golds, str):
        try:                                                        # PopQA's form: a JSON list inside a string
            parsed = json.loads(golds)
        except ValueError:
            parsed = None
        golds = parsed if isinstance(parsed, list) else [golds]
    golds = [] if golds is None else list(golds)
    golds = [str(gold) for gold in golds if gold is not None]
    if not isinstance(question, str) or not question.strip() or not golds:
        raise InputError(f"{where} needs a question and golden_answers; it has {', '.join(map(str, row)) or 'nothing'}")
    return {"id": str(row.get("id", where)), "question": question.strip(), "golden_answers": golds}


def load_questions(spec: str, splits=("train",)) -> list[dict]:
    """Questions of hub sets ("nq+hotpotqa") or local files ("a.jsonl+b.parquet"); of a hub set the first split that it has."""
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
                    raise InputError(f"--data {name} is not a readable parquet file: {str(error).splitlines()[0]}") from None
            else:
                rows = read_jsonl(name)
            questions += [as_question(row, f"{name}, line {number}") for number, row in rows]
        else:                                              # FlashRAG's collection: id, question, golden_answers per set
            from datasets import load_dataset
            try:
                sets = load_dataset("RUC-NLPIR/FlashRAG_datasets", name)
            except ValueError as error:                    # no such set in the collection
                raise InputError(f"--data {name}: {str(error).splitlines()[0]}") from None
            split = next((s for s in splits if s in sets), None)
            if split is None:
                raise InputError(f"--data {name}: the hub set has no {' or '.join(splits)} split, only {', '.join(sets)}")
            questions += [as_question(row, f"{name} {split}, row {number}") for number, row in enumerate(sets[split], 1)]
    if not questions:
        raise InputError(f"--data {spec} holds no question")
    return questions


def load_hotpotqa(count: int, seed: int, split="train") -> tuple[list[dict], list[dict]]:
    """`count` HotpotQA questions, drawn by `seed`, and the paragraphs that come with them."""
    from datasets import load_dataset
    rows = load_dataset("hotpotqa/hotpot_qa", "distractor")[split].shuffle(seed=seed)
    rows = rows.select(range(min(count, len(rows))))
    return [as_question(row, f"hotpot_qa, row {n}") for n, row in enumerate(rows, 1)], hotpotqa_corpus(rows)
