"""Makes everything else in this folder, deterministically, in a few minutes on one CPU core.

    python tests/tiny/make.py [FOLDER]

The tiny world is a stand-in for Wikipedia: invented people, films and cities, passages that say who directed a film and
where a person was born, and questions of one and two hops over them. Of most people three passages name three cities,
and the search engine returns all of them; the one of the lowest rank counts, by a hidden order of the cities that is
the same for all questions. Wrong responses are then nearly identical to right ones, as in the paper's case studies,
and there is something to learn, slowly, that also holds for questions never asked before. The policy (Qwen2
architecture, word-level tokenizer) is warm-started on demonstrations over OTHER random worlds with the same names: it
learns to search and to copy, but no fact and no rank. In half of the two-hop demonstrations the second search is left
out and the city is a guess.
"""
import hashlib
import json
import random
import re
import sys
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
import llds_grpo                                                                                            # noqa: E402
from retriever import INVALID, BM25Retriever                                                                         # noqa: E402

PEOPLE, FILMS, CITIES = 150, 300, 40
AMBIGUOUS, RIVALS = 0.8, 3                                  # share of people with rival cities, and how many they have
SHORTCUT = 0.5                                              # share of two-hop demonstrations that guess the city
ONE_HOP, DIRECTOR, TWO_HOP, TEST = 450, 150, 900, 200       # 30 %, 10 %, 60 % of the questions; how many are held out
FORMS = {"one": ["where was {} born ?", "what is the birthplace of {} ?", "in which city was {} born ?"],
         "director": ["who directed {} ?", "who is the director of {} ?", "name the director of {} ."],
         "two": ["where was the director of {} born ?", "what is the birthplace of the director of {} ?",
                 "in which city was the director of {} born ?"]}
PLAN = "find the director of {}"
DIRECTED = "who directed {}"
KNOWN = "the director is {}"
CITY = "find the city of {}"
BORN = "where was {} born"
FACT = "{} was born in {}"
STEPS, BATCH, LR, WARMUP = 1200, 32, 2e-3, 50
WORD = r"</?[a-z]+>|\(Title:|\w+|[^\w\s]"                   # what the tokenizer takes as one word
TAGS = ["<think>", "</think>", "<search>", "</search>", "<information>", "</information>", "<answer>", "</answer>"]


def names(rng, count, taken):
    """Invented one-word names of 2 to 4 consonant-vowel syllables."""
    found = []
    while len(found) < count:
        name = "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.randint(2, 4))).capitalize()
        if name not in taken:
            taken.add(name)
            found.append(name)
    return found


def rank(city: str) -> bytes:
    """The hidden order of the cities: a hash of the name."""
    return hashlib.sha256(city.encode()).digest()


class World:
    """One assignment of directors and birthplaces to the names, with its passages and search engine."""

    def __init__(self, rng, people, films, cities):
        self.people, self.films, self.cities = people, films, cities
        self.director = {film: rng.choice(people) for film in films}
        self.born = {person: rng.sample(cities, RIVALS if rng.random() < AMBIGUOUS else 1) for person in people}
        texts = [(p, f"{p} was born in {city} .") for p in people for city in self.born[p]]
        texts += [(film, f"{film} was directed by {self.director[film]} .") for film in films]
        rng.shuffle(texts)
        self.passages = [{"id": str(i), "title": title, "text": text} for i, (title, text) in enumerate(texts)]
        self.retriever = BM25Retriever(self.passages)

    def question(self, kind, name, form):
        """{"question", "golden_answers"}; where cities compete, the one of the lowest rank is right."""
        text = FORMS[kind][form].format(name)
        if kind == "director":
            return {"question": text, "golden_answers": [self.director[name]]}
        cities = self.born[name if kind == "one" else self.director[name]]
        return {"question": text, "golden_answers": [min(cities, key=rank)]}

    def demonstration(self, rng, kind, name, tokenizer, cfg):
        """Token ids and action mask of one worked example."""
        ids = llds_grpo.encode_prompt(self.question(kind, name, rng.randrange(3))["question"], tokenizer, cfg)
        mask = [0] * len(ids)

        def act(text, query=None):
            action = tokenizer.encode(text)
            feedback = llds_grpo.encode_feedback(self.retriever.search([query])[0], tokenizer, cfg.max_feedback_tokens) if query else []
            ids.extend(action + feedback)
            mask.extend([1] * len(action) + [0] * len(feedback))

        person, think = name, CITY.format(name)
        if kind != "one":
            person, query = self.director[name], DIRECTED.format(name)
            act(f"<think> {PLAN.format(name)} </think> <search> {query} </search>", query)
            think = KNOWN.format(person)
        if kind == "director":
            act(f"<think> {think} </think> <answer> {person} </answer>")
        elif kind == "two" and rng.random() < SHORTCUT:                      # the guess that RL can improve on
            act(f"<think> {think} </think> <answer> {rng.choice(self.cities)} </answer>")
        else:
            query, city = BORN.format(person), rng.choice(self.born[person])
            act(f"<think> {think} </think> <search> {query} </search>", query)
            act(f"<think> {FACT.format(person, city)} </think> <answer> {city} </answer>")
        return ids, mask


def make_tokenizer(words):
    """Word-level: tags, words and single punctuation marks; a text decodes to its words joined by spaces."""
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Split(Regex(WORD), "isolated")])
    tokenizer.decoder = decoders.WordPiece(prefix="##", cleanup=False)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")


def warm_start(policy, tokenizer, cfg, lists, rng):
    """Cross-entropy on the action tokens of demonstrations, a fresh random world for every batch."""
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(STEPS):
        world = World(rng, *lists)
        kinds = rng.choices(["one", "director", "two"], [ONE_HOP, DIRECTOR, TWO_HOP], k=BATCH)
        rows = [world.demonstration(rng, kind, rng.choice(world.people if kind == "one" else world.films), tokenizer, cfg) for kind in kinds]
        length = max(len(ids) for ids, _ in rows)
        input_ids = torch.tensor([ids + [0] * (length - len(ids)) for ids, _ in rows])                      # (B, T + 1)
        mask = torch.tensor([mask + [0] * (length - len(mask)) for _, mask in rows])[:, 1:]                 # (B, T)
        optimizer.param_groups[0]["lr"] = LR * min((step + 1) / WARMUP, (STEPS - step) / (STEPS - WARMUP))
        optimizer.zero_grad()
        total = 0.0
        for chosen in llds_grpo.microbatches([len(ids) for ids, _ in rows], 4096):
            logps, _ = llds_grpo.token_logps(policy, input_ids[chosen], mask[chosen])
            loss = -logps.sum() / mask.sum()
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0 or step == STEPS - 1:
            print(f"warm start, step {step}: loss {total:.3f}", flush=True)


def main(folder: Path):
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)
    torch.manual_seed(0)
    taken = set()
    lists = names(rng, PEOPLE, taken), names(rng, FILMS, taken), names(rng, CITIES, taken)
    forms = " ".join([PLAN, DIRECTED, KNOWN, CITY, BORN, FACT, *(form for group in FORMS.values() for form in group)]).replace("{}", "")
    plain_text = "Question: Doc 1 2 3 (Title: ) . No passage found by " + forms + INVALID
    words = list(dict.fromkeys(TAGS + re.findall(WORD, plain_text) + [name for group in lists for name in group]))
    tokenizer = make_tokenizer(words)
    cfg = llds_grpo.TINY
    world = World(rng, *lists)
    questions = [world.question(kind, name, form) for kind, pool, count in (("one", world.people, ONE_HOP), ("director", world.films, DIRECTOR),
                 ("two", world.films, TWO_HOP)) for name in rng.sample(pool, count // 3) for form in range(3)]
    rng.shuffle(questions)
    write = lambda name, rows: (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write("corpus.jsonl", [{"id": p["id"], "contents": f"\"{p['title']}\"\n{p['text']}"} for p in world.passages])
    write("test.jsonl", [{"id": f"test_{i}", **q} for i, q in enumerate(questions[:TEST])])
    write("train.jsonl", [{"id": f"train_{i}", **q} for i, q in enumerate(questions[TEST:])])
    config = Qwen2Config(vocab_size=len(tokenizer), hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
                         num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True,
                         bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    policy = Qwen2ForCausalLM(config)
    warm_start(policy, tokenizer, cfg, lists, rng)
    policy.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    print(f"{policy.num_parameters():,} parameters, {len(tokenizer)} words, {len(world.passages)} passages, {len(questions)} questions")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).resolve().parent)
