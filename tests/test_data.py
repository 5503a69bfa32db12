"""Retrieval, corpora and questions: local files, the hub's schemas, and a real HTTP server that misbehaves."""
import gzip
import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

import llds_grpo as L
import retriever as R
from retriever import BM25Retriever, HTTPRetriever, InputError, LuceneBM25, RetrieverError, load_corpus, tokenize


def passages(texts):
    return [{"id": str(i), "title": "", "text": text} for i, text in enumerate(texts)]


def found(texts, query, k=3):
    return [int(p["id"]) for p in BM25Retriever(passages(texts)).search([query], k)[0]]


# ------------------------------------------------------------------------------------------------------------------ BM25

def test_tokenize():
    assert tokenize("The U.S., Café-Bar!") == ["the", "u", "s", "café", "bar"]
    assert tokenize("Cafe\u0301") == tokenize("CAFÉ") == ["café"]


def test_small_corpora():
    assert found(["violet harbour lighthouse", "copper mill bakery"], "lighthouse harbour") == [0]
    assert found(["violet harbour lighthouse"], "lighthouse") == [0]
    assert found(["river otter", "river heron", "river newt"], "river", 2) == [0, 1]
    assert found(["opal ring", "opal vase", "opal lamp", "jade lamp"], "opal lamp", 1) == [2]
    assert found(["", "granite quarry", "slate mine"], "granite") == [1]
    assert found(["", ""], "granite") == []


def test_nothing_to_ask_or_too_much():
    search = BM25Retriever(passages(["a b", "c d", "e f"])).search
    assert search(["", "   ", "?!", "zebra"]) == [[], [], [], []] and search([]) == []
    assert [p["id"] for p in search(["a c e"], 10)[0]] == ["0", "1", "2"]
    for k in (0, -1):
        with pytest.raises(ValueError, match="topk"):
            search(["a"], k)
    with pytest.raises(InputError, match="empty"):
        BM25Retriever([])


def test_postings_equal_rank_bm25s_own_scores():
    rng = np.random.default_rng(0)
    words = [f"w{i}" for i in range(60)]
    for n in (1, 2, 7, 400):
        texts = [" ".join(rng.choice(words, rng.integers(0, 12))) for _ in range(n)] + ["w0"]
        ours, theirs = BM25Retriever(passages(texts)), LuceneBM25([tokenize(t) for t in texts])
        for _ in range(60):
            query = " ".join(rng.choice(words + ["unknown"], rng.integers(0, 6)))
            scores = theirs.get_scores(tokenize(query))
            order = [i for i in np.argsort(-scores, kind="stable")[:3] if scores[i] > 0]
            hits = ours.search([query])[0]
            assert [int(p["id"]) for p in hits] == order
            assert all(abs(p["score"] - scores[i]) < 1e-9 for p, i in zip(hits, order))


def test_bm25_by_hand():
    # N = 2, "a" in one passage of 1 word out of 1.5 on average: idf = ln(1 + 1.5 / 1.5) = ln 2; k1 = 1.5, b = .75
    hit, = BM25Retriever(passages(["a", "b c"])).search(["a"])[0]
    assert abs(hit["score"] - np.log(2) * 2.5 / (1 + 1.5 * (0.25 + 0.75 / 1.5))) < 1e-12


def test_load_corpus(tmp_path):
    lines = ['{"id": 7, "contents": "\\"Opal \\\\\\"x\\"\\nA ring."}', "", '{"id": "8", "contents": "no title"}', '{"contents": "t\\nb\\nc"}']
    (tmp_path / "c.jsonl").write_text("\n".join(lines))
    with gzip.open(tmp_path / "c.jsonl.gz", "wt") as file:
        file.write("\n".join(lines))
    expected = [{"id": "7", "title": 'Opal \\"x', "text": "A ring."}, {"id": "8", "title": "", "text": "no title"}, {"id": "3", "title": "t", "text": "b\nc"}]
    assert load_corpus(tmp_path / "c.jsonl") == load_corpus(tmp_path / "c.jsonl.gz") == expected
    for bad in ('{"id": 1}', "[1]", "{", '{"contents": null}', '"x"'):
        (tmp_path / "bad.jsonl").write_text(lines[0] + "\n" + bad)
        with pytest.raises(InputError, match="line 2"):
            load_corpus(tmp_path / "bad.jsonl")
    (tmp_path / "latin.jsonl").write_bytes('{"contents": "caf\u00e9"}'.encode("latin-1"))
    (tmp_path / "half.jsonl.gz").write_bytes((tmp_path / "c.jsonl.gz").read_bytes()[:-20])
    for name in ("latin.jsonl", "half.jsonl.gz"):
        with pytest.raises(InputError, match=name):
            load_corpus(tmp_path / name)
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(InputError, match="no passage"):
        load_corpus(tmp_path / "empty.jsonl")


def test_a_byte_order_mark_is_skipped(tmp_path):
    passage, question = '{"id": "7", "contents": "A moth."}\n', '{"question": "who ?", "answer": "a"}\n'
    for mark in (b"", b"\xef\xbb\xbf"):
        for name, write in (("x.jsonl", Path.write_bytes), ("x.jsonl.gz", lambda path, data: path.write_bytes(gzip.compress(data))),
                            ("x.json", Path.write_bytes), ("X.JSONL", Path.write_bytes)):
            write(tmp_path / name, mark + passage.encode())
            assert load_corpus(str(tmp_path / name)) == [{"id": "7", "title": "", "text": "A moth."}]
            write(tmp_path / name, mark + question.encode())
            assert R.load_questions(str(tmp_path / name))[0]["golden_answers"] == ["a"]
            write(tmp_path / name, mark + b"\n[" + question.encode() + b"]")                    # one JSON array
            assert [q["question"] for q in R.load_questions(str(tmp_path / name))] == ["who ?"]


MOSS = {"id": "7", "title": "Moss", "text": "Moss is a plant."}


@pytest.mark.parametrize("row", [MOSS, {"id": "7", "title": "Moss", "contents": "Moss is a plant."}, {"_id": 7, "title": "Moss", "text": "Moss is a plant."},
                                 {"id": 7, "contents": '"Moss"\nMoss is a plant.'}, {"id": 7, "title": "Moss", "contents": '"Moss"\nMoss is a plant.'},
                                 {"id": 7, "title": None, "contents": "Moss\nMoss is a plant."}, {**MOSS, "contents": None}])
def test_passages_as_other_projects_write_them(row, tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps(row))
    assert load_corpus(str(tmp_path / "c.jsonl")) == [MOSS]
    assert client_reply([[{"document": row, "score": 1}]]) == client_reply([[row]], 0.0, 1.0) == [[{**MOSS, "score": 1.0}]]
    assert [p["title"] for p in BM25Retriever(load_corpus(str(tmp_path / "c.jsonl"))).search(["moss"])[0]] == ["Moss"]


def client_reply(result, without=None, score=None):
    """What HTTPRetriever makes of an answer; a bare document has the score `without`, replaced by `score`."""
    found = HTTPRetriever._parse({"result": result}, 1, 3)
    return [[{**p, "score": score} if p["score"] == without else p for p in passages] for passages in found]


def test_another_title_line_is_text():
    assert R.as_passage({"title": "Moss", "contents": "Plants\nMoss is one."}, "", 4) == {"id": "4", "title": "Moss", "text": "Plants\nMoss is one."}


@pytest.mark.parametrize("row", [{"contents": None}, {"contents": 3}, {"title": "Moss"}, {"title": ["Moss"], "text": "x"}, {"text": {"a": 1}}, {}])
def test_unusable_passages_are_named(row, tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps(MOSS) + "\n" + json.dumps(row))
    with pytest.raises(InputError, match="line 2.*needs"):
        load_corpus(str(tmp_path / "c.jsonl"))


def test_a_search_takes_a_list_of_texts_and_an_index_passages():
    search = BM25Retriever(passages(["a moth"])).search
    for queries in ("moth", [3], [None]):
        for ask in (search, HTTPRetriever("http://127.0.0.1:9/retrieve").search):
            with pytest.raises(InputError, match="list of texts"):
                ask(queries)
    for wrong in (["a b"], "a b", [{"text": "a b"}], [("a", "b")]):
        with pytest.raises(InputError, match="takes passages"):
            BM25Retriever(wrong)


# ------------------------------------------------------------------------------------------------------------- questions

@pytest.mark.parametrize("golds", [["Cobalt", "Co"], np.array(["Cobalt", "Co"], dtype=object), "Cobalt", '["Cobalt","Co"]', ("Cobalt",), ["Cobalt", None]])
def test_gold_answers_in_any_shape(golds):
    question = R.as_question({"question": "q", "golden_answers": golds}, "row 1")
    assert L.exact_match("cobalt", question["golden_answers"]) == 1 and L.exact_match("c", question["golden_answers"]) == 0


def test_gold_answers_that_are_numbers_or_missing():
    assert R.as_question({"question": "q", "golden_answers": [5]}, "")["golden_answers"] == ["5"]
    assert R.as_question({"question": "q", "golden_answers": "[unfinished"}, "")["golden_answers"] == ["[unfinished"]
    for row in ({"question": "q", "golden_answers": None}, {"question": "q", "golden_answers": []}, {"question": "q"}, {"golden_answers": ["a"]},
                {"question": " ", "golden_answers": ["a"]}, {"question": 3, "golden_answers": ["a"]}, {}):
        with pytest.raises(InputError, match="row 9"):
            R.as_question(row, "row 9")


@pytest.mark.parametrize("field, value, golds", [
    ("answer", {"value": "Oslo", "aliases": ["Christiania", "Oslo"]}, ["Oslo", "Christiania"]),                         # TriviaQA
    ("answer", {"value": "Oslo", "aliases": ["Kristiania"], "normalized_value": "oslo", "type": "x"}, ["Oslo", "Kristiania", "oslo"]),
    ("answers", {"text": ["Oslo", "Oslo"], "answer_start": [3, 9]}, ["Oslo"]),                                          # SQuAD
    ("answers", [{"text": "Oslo", "answer_start": 3}], ["Oslo"]),
    ("reward_model", {"ground_truth": {"target": ["Oslo"]}, "style": "rule"}, ["Oslo"]),                                 # Search-R1
    ("answer", 1969, ["1969"]), ("answer", 1969.0, ["1969"]), ("answer", 3.5, ["3.5"]), ("golden_answers", [["Oslo"]], ["Oslo"]),
    ("golden_answers", np.array("Oslo"), ["Oslo"]), ("golden_answers", np.array([1, 2]), ["1", "2"]), ("golden_answers", np.int64(5), ["5"]),
    ("answer", '{"value": "Oslo"}', ["Oslo"]), ("answer", "[1, 2]", ["1", "2"]), ("answer", "{x", ["{x"]), ("answer", " Oslo ", ["Oslo"]),
    ("golden_answers", ["", "Oslo", None, " "], ["Oslo"])])
def test_gold_answers_as_other_sets_write_them(field, value, golds):
    assert R.as_question({"question": "q", field: value}, "row 1")["golden_answers"] == golds


@pytest.mark.parametrize("value", [True, [True], {"name": "Oslo"}, {}, "", [""], [[], None], None, float("nan"), float("inf"), {"text": [], "answer_start": []},
                                   np.array([]), b"Oslo", {"value": None}, {"target": [{}]}])
def test_gold_answers_that_cannot_match_are_named(value):
    for field in ("answer", "answers", "golden_answers"):
        with pytest.raises(InputError, match="row 9"):
            R.as_question({"question": "q", field: value}, "row 9")


def test_the_first_gold_field_that_is_there_counts():
    row = {"question": "q", "golden_answers": None, "answer": "a", "answers": ["b"], "reward_model": {"ground_truth": {"target": "c"}}}
    assert R.as_question(row, "")["golden_answers"] == ["a"]
    assert R.as_question({**row, "golden_answers": ["g"]}, "")["golden_answers"] == ["g"]
    assert R.as_question({"question": "q", "answer": "a", "_id": 0}, "x")["id"] == "0" and R.as_question({"question": "q", "answer": "a"}, "x")["id"] == "x"


def test_local_names_are_never_looked_for_on_the_hub(tmp_path, monkeypatch):
    import datasets
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: pytest.fail("asked the hub"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c++").mkdir()
    row = '{"question": "who ?", "answer": "a"}'
    for name in ("q.jsonl.gz", "c++/t.jsonl", "a+b.jsonl", "plain"):
        data = row.encode()
        (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert len(R.load_questions("q.jsonl.gz")) == 1 and len(R.load_questions("c++/t.jsonl+q.jsonl.gz+a+b.jsonl")) == 3
    for name, message in (("nothere.json", "no such file"), ("nothere.jsonl.gz", "no such file"), ("no/where", "no such file"), ("c++/x.jsonl", "no such file"),
                          ("q.jsonl.gz+x.jsonl", "no such file as x.jsonl"), ("plain", "without suffix"), ("c++", "is a folder")):
        with pytest.raises(InputError, match=f"--test-data.*{message}"):
            R.load_questions(name, option="--test-data")
    for suffix in (".csv", ".tsv", ".txt", ".json.zip", ".parquet.gz.x"):
        (tmp_path / f"q{suffix}").write_text(row)
        with pytest.raises(InputError, match="only .jsonl, .json, .parquet"):
            R.load_questions(f"q{suffix}")
        with pytest.raises(InputError, match="only .jsonl, .json, .parquet"):
            load_corpus(f"q{suffix}")
    (tmp_path / "half.json").write_text("[" + row)
    with pytest.raises(InputError, match="JSON array"):
        R.load_questions("half.json")
    (tmp_path / "numbers.json").write_text("[" + row + ", 3]")
    with pytest.raises(InputError, match="item 2"):
        R.load_questions("numbers.json")


def test_local_files(tmp_path):
    import datasets
    rows = [{"id": "1", "question": "who?", "golden_answers": ["A", "B"]}, {"id": "2", "question": "where?", "golden_answers": ["C"]}]
    (tmp_path / "q.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "q.parquet")
    assert R.load_questions(str(tmp_path / "q.jsonl")) == R.load_questions(str(tmp_path / "q.parquet")) == rows
    assert len(R.load_questions(f"{tmp_path}/q.jsonl+{tmp_path}/q.parquet")) == 4
    for text, message in (("{", "line 1"), ("", "no question"), ('{"question": "q"}', "line 1")):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(InputError, match=message):
            R.load_questions(str(tmp_path / "bad.jsonl"))
    (tmp_path / "bad.parquet").write_bytes(b"not parquet")
    with pytest.raises(InputError, match="bad.parquet"):
        R.load_questions(str(tmp_path / "bad.parquet"))


@pytest.fixture
def hub(monkeypatch):
    """datasets.load_dataset with the hub's schemas, from memory."""
    import datasets
    flash = {"nq": ("train", "dev", "test"), "popqa": ("test",), "hotpotqa": ("train", "dev")}
    context = {"title": ["Opal", "Jade"], "sentences": [["Opal is a stone.", " It shines."], ["Jade is green."]]}

    def load_dataset(repository, name):
        make = lambda rows: datasets.Dataset.from_list(rows)
        if repository == "hotpotqa/hotpot_qa":
            assert name == "distractor"
            return datasets.DatasetDict({s: make([{"id": str(i), "question": f"{s} q{i}?", "answer": "opal", "context": context} for i in range(9)])
                                         for s in ("train", "validation")})
        assert repository == "RUC-NLPIR/FlashRAG_datasets"
        return datasets.DatasetDict({s: make([{"id": f"{s}_0", "question": f"{name} {s}?", "golden_answers": ["a"]}]) for s in flash[name]})

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)


def test_hub_sets(hub):
    assert [q["question"] for q in R.load_questions("nq+hotpotqa")] == ["nq train?", "hotpotqa train?"]
    assert [R.load_questions(n, ("test", "dev"))[0]["question"] for n in ("nq", "popqa", "hotpotqa")] == ["nq test?", "popqa test?", "hotpotqa dev?"]
    with pytest.raises(InputError, match="popqa.*only test"):
        R.load_questions("popqa")


def test_hotpotqa_brings_its_own_paragraphs(hub):
    questions, search = L.load_task(L.Config(hotpotqa_questions=4))
    assert len(questions) == 4 and questions[0]["golden_answers"] == ["opal"]
    hit, = search.search(["shines"])[0]
    assert hit["title"] == "Opal" and hit["text"] == "Opal is a stone. It shines." and len(search.passages) == 2
    with pytest.raises(InputError, match="--corpus FILE or --retriever-url"):
        L.load_task(L.Config(data="nq"))


# ------------------------------------------------------------------------------------------------------------ HTTP server

@pytest.fixture
def server():
    """A real server on this machine; `replies` is a list of functions of the request, the last one is kept."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            httpd.requests.append(request)
            reply = httpd.replies.pop(0) if len(httpd.replies) > 1 else httpd.replies[0]
            status, body = reply(request)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body if isinstance(body, bytes) else json.dumps(body).encode())

        def log_message(self, *arguments):
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.requests = []
    threading.Thread(target=httpd.serve_forever, daemon=True).start()
    httpd.url = f"http://127.0.0.1:{httpd.server_port}/retrieve"
    yield httpd
    httpd.shutdown()


def good(request):
    doc = lambda q: {"document": {"id": "d", "contents": f'"{q} title"\n{q} text'}, "score": 0.5}
    return 200, {"result": [[doc(q)] * request["topk"] for q in request["queries"]]}


def client(url, timeout=2.0):
    return HTTPRetriever(url, timeout=timeout, pause=0.01)


def test_the_servers_protocol(server):
    server.replies = [good]
    results = client(server.url).search(["x", "y"], 2)
    assert server.requests == [{"queries": ["x", "y"], "topk": 2, "return_scores": True}]
    assert results == [[{"id": "d", "title": f"{q} title", "text": f"{q} text", "score": 0.5}] * 2 for q in "xy"]
    assert client(server.url).search([]) == [] and len(server.requests) == 1


def test_bare_documents_and_documents_without_title(server):
    server.replies = [lambda r: (200, {"result": [[{"contents": '"T"\nbody'}, {"document": {"contents": "only text"}}]]})]
    first, second = client(server.url).search(["x"])[0]
    assert (first["title"], first["text"]) == ("T", "body") and (second["title"], second["text"]) == ("", "only text")


def test_a_failure_is_tried_again(server):
    server.replies = [lambda r: (500, b"<html>oops"), good]
    assert len(client(server.url).search(["x"])[0]) == 3 and len(server.requests) == 2


@pytest.mark.parametrize("document, cause", [({"contents": None}, "needs \"contents\""), ({"document": {"title": 3, "text": "x"}}, "needs \"contents\""),
                                             ({"contents": "x", "score": None}, "score is None"), ("x", "needs"), ({"document": "x"}, "needs")])
def test_an_unusable_passage_of_the_server_is_one_sentence(server, document, cause):
    server.replies = [lambda r: (200, {"result": [[document]]})]
    with pytest.raises(RetrieverError, match=cause) as caught:
        client(server.url).search(["x"])
    assert server.url in str(caught.value) and not re.search("AttributeError|KeyError|TypeError", str(caught.value))


@pytest.mark.parametrize("reply", [
    lambda r: (500, b"<html>oops</html>"), lambda r: (200, b"<html>"), lambda r: (200, {}), lambda r: (200, {"result": None}), lambda r: (200, [1]),
    lambda r: (200, {"result": [[]]}), lambda r: (200, {"result": [[{"document": {}}], []]}), lambda r: (200, {"result": [["x"], ["y"]]}), lambda r: (200, b'{"result": [[{"docu')])
def test_a_server_that_answers_nonsense_is_an_error(server, reply):
    server.replies = [reply]
    with pytest.raises(RetrieverError, match=f"{server.server_port}/retrieve failed 3 times, last with"):
        client(server.url).search(["x", "y"])
    assert len(server.requests) == 3


def test_a_silent_or_absent_server_is_an_error(server):
    server.replies = [lambda r: time.sleep(0.6) or good(r)]
    with pytest.raises(RetrieverError, match="timed out"):
        client(server.url, timeout=0.1).search(["x"])
    with pytest.raises(RetrieverError, match="--retriever-url"):
        client("http://127.0.0.1:9/retrieve").search(["x"])


def test_training_with_a_server_that_dies_keeps_the_last_checkpoint(server, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(R.time, "sleep", lambda seconds: None)
    alive = [True]
    server.replies = [lambda r: good(r) if alive[0] else (500, b"")]
    options = ["--out", str(tmp_path / "run"), "--retriever-url", server.url, "--steps", "3", "--save-every", "1", "--questions-per-step", "2", "--group-size", "2",
               "--updates-per-rollout", "2"]
    save = L.save_checkpoint
    monkeypatch.setattr(L, "save_checkpoint", lambda *a: (save(*a), alive.clear(), alive.append(False)))
    assert L.main(options) == 2
    assert "failed 3 times" in capsys.readouterr().err
    assert [p.name for p in L.checkpoints(tmp_path / "run")] == ["checkpoint-1"] and len(R.read_metrics(tmp_path / "run")) == 1
    alive[0] = True
    monkeypatch.setattr(L, "save_checkpoint", save)
    assert L.main(["--resume", str(tmp_path / "run")]) == 0 and len(R.read_metrics(tmp_path / "run")) == 3
