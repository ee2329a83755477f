#!/usr/bin/env python3
"""Write any number of short, varied prompts (JSONL) for a run on a target that answers them itself: templates times topics, shuffled, no two alike.

They are for measuring the way from prompts to a served drafter, not a training set for a large model: a drafter learns what its prompts ask for.
"""

import argparse
import itertools
import json
import random
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from aerie.errors import UserError, run_main

TASKS = (
    "bake bread", "wash a woollen jumper", "repair a flat bicycle tyre", "write a letter of thanks", "plan a small garden", "clean a kitchen", "learn the guitar",
    "organise a birthday party", "save money each month", "prepare for an interview", "make lemonade", "choose a laptop", "paint a room", "train a puppy", "sleep better",
    "write a CV", "cook rice", "learn a language", "plan a week of meals", "start running", "sharpen a knife", "pack for a trip", "read more books", "make a budget",
    "keep houseplants alive", "build a bookshelf", "fix a leaking tap", "take good photographs", "remember names", "give a short speech", "make tea", "store vegetables",
    "set up a desk", "teach a child to swim", "write a poem", "find a lost key", "tie a tie", "use less electricity", "make a scarecrow", "mend a sock",
)  # fmt: skip
THINGS = (
    "the moon", "a rainbow", "photosynthesis", "gravity", "the water cycle", "a volcano", "electricity", "the heart", "a computer", "the internet", "a bridge", "a compass",
    "money", "a glacier", "yeast", "a magnet", "the tides", "a seed", "sound", "light", "a battery", "friction", "the seasons", "a lighthouse", "a lever", "salt", "sleep",
    "a map", "an earthquake", "the alphabet", "a windmill", "soap", "steel", "a bee", "democracy", "inflation", "a contract", "a vaccine", "paper", "a clock",
)  # fmt: skip
LISTS = (
    "fruits", "animals that live in the sea", "musical instruments", "sports", "trees", "kitchen tools", "colours", "countries in Europe", "large rivers", "jobs in a hospital",
    "things to do on a rainy day", "healthy breakfasts", "board games", "birds", "vegetables", "ways to say thank you", "inventions", "planets", "tools of a carpenter",
    "reasons to learn to cook", "good habits", "questions to ask a new colleague", "gifts for a friend", "books for children", "hobbies", "famous scientists", "kinds of bread",
    "winter sports", "ideas for a picnic", "ways to save water",
)  # fmt: skip
PLACES = (
    "France", "Italy", "Japan", "Brazil", "Canada", "Egypt", "Kenya", "India", "Spain", "Norway", "Mexico", "Peru", "Greece", "Turkey", "Poland", "Sweden", "Chile", "Cuba",
    "Portugal", "Ireland", "Austria", "Hungary", "Morocco", "Vietnam", "Thailand", "Germany", "Finland", "Denmark", "Iceland", "Argentina",
)  # fmt: skip
CODE = (
    "adds two numbers", "reverses a string", "counts the words in a text", "finds the largest number in a list", "checks whether a number is even",
    "checks whether a word is a palindrome", "computes a factorial", "sorts a list of names", "removes duplicates from a list", "sums the digits of a number",
    "converts Celsius to Fahrenheit", "finds the prime numbers up to n", "merges two sorted lists", "counts the vowels in a word", "reads a file line by line",
    "computes the mean of a list", "prints a multiplication table", "finds the longest word in a sentence", "flattens a nested list", "computes the n-th Fibonacci number",
    "checks whether a year is a leap year", "counts how often each letter appears", "rounds a number to two digits", "generates a random password", "joins words with commas",
)  # fmt: skip
STORIES = (
    "a fox who could not sleep", "an old lighthouse", "a girl who finds a map", "two rivers", "a robot in a garden", "a lost umbrella", "a baker and a bird", "the last train",
    "a dragon who is afraid of fire", "a letter that came too late", "a quiet village", "the first snow", "a broken clock", "a boy and his boat", "a teacher on the moon",
    "a cat in a library", "an honest thief", "a storm at sea", "a small key", "a tree that remembers",
)  # fmt: skip
TEMPLATES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lists": (("How do I {}?", "Give me five steps to {}.", "What is the best way to {}?", "What do I need to {}?", "I want to {}. Where do I start?", "Give me some tips on how to {}.",
               "What mistakes do people make when they {}?", "Write a short guide on how to {}.", "How long does it take to {}?", "Can you teach me to {}?"), TASKS),
    "facts": (("Explain {} in simple words.", "What is {}?", "Why is {} important?", "Tell me three facts about {}.", "How would you explain {} to a child?",
               "Write a short paragraph about {}.", "What is {} used for?", "Where can I see {}?", "Describe {} in two sentences.", "Give an example that has to do with {}."), THINGS),
    "chat": (("List five {}.", "Name ten {}.", "Can you name some {}?", "Which {} do you like most, and why?", "Give me a list of {} with one sentence each.", "What are some {}?"), LISTS),
    "places": (("What is the capital of {}?", "What is {} known for?", "Tell me about the food of {}.", "Plan three days in {}.", "What language do people speak in {}?",
                "What is the weather like in {}?", "Write a postcard from {}.", "Name three cities in {}."), PLACES),
    "code": (("Write a Python function that {}.", "Write a function in JavaScript that {}.", "How do I write a program that {}?", "Show me code that {} and explain it.",
              "Write a test for a function that {}."), CODE),
    "stories": (("Write a short story about {}.", "Write a poem about {}.", "Begin a story about {}.", "Write four lines about {}.", "Give a title for a book about {}."), STORIES),
}  # fmt: skip
AUDIENCES = ("a beginner", "a child of six", "my grandmother", "a student", "a busy parent", "a tourist", "a colleague", "an engineer", "a class of teenagers", "a friend")
# Two different topics of one kind, and topics of two kinds: where there are thousands of prompts, most come from here.
PAIRS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "lists": (("I have one day to {} and to {}. Make me a plan.", "What is harder: to {} or to {}?", "Give me three tips to {}, and three to {}."), TASKS),
    "facts": (("What is the difference between {} and {}?", "Explain {} and {} in simple words.", "What do {} and {} have in common?", "Which came first, {} or {}?",
               "Write a quiz question about {} and one about {}."), THINGS),
    "chat": (("List three {} and three {}.", "What do you know about {} and about {}?", "Help me choose between {} and {} as a topic for a talk."), LISTS),
    "places": (("I have been to {}. Would I like {} too?", "Compare the food of {} and {}.", "Which is larger, {} or {}?", "Plan a trip from {} to {}."), PLACES),
    "code": (("Write a Python program that {} and then {}.", "Which is easier to write, code that {} or code that {}?"), CODE),
    "stories": (("Write a short story about {} and {}.", "Write a dialogue between {} and {}.", "Write a poem in which {} meets {}."), STORIES),
}  # fmt: skip
MIXED: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]] = {
    "lists": (("Explain to {} how to {}.", "Write a note for {} on how to {}."), AUDIENCES, TASKS),
    "facts": (("Explain {} to {}.", "Write a short text about {} for {}."), THINGS, AUDIENCES),
    "chat": (("Recommend some {} for {}.",), LISTS, AUDIENCES),
    "places": (("What can I do in {} with {}?",), PLACES, AUDIENCES),
    "stories": (("Write a short story about {} in {}.", "Write four lines about {}, set in {}."), STORIES, PLACES),
    "code": (("Explain to {} how to write a program that {}.",), AUDIENCES, CODE),
}  # fmt: skip


def all_prompts() -> list[tuple[str, str]]:
    """(category, prompt), each once."""
    rows = [(category, text.format(topic)) for category, (texts, topics) in TEMPLATES.items() for text, topic in itertools.product(texts, topics)]
    rows += [(category, text.format(*pair)) for category, (texts, topics) in PAIRS.items() for text, pair in itertools.product(texts, itertools.combinations(topics, 2))]
    return rows + [(category, text.format(*pair)) for category, (texts, *topics) in MIXED.items() for text, pair in itertools.product(texts, itertools.product(*topics))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, help="how many prompts")
    parser.add_argument("output", type=Path, help="the JSONL file to write")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    rows = all_prompts()
    if not 0 < args.count <= len(rows):
        raise UserError(f"count = {args.count} must be 1 to {len(rows)}: that many prompts these templates give")
    random.Random(args.seed).shuffle(rows)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    with open(args.output, "w", encoding="utf-8") as file:
        for category, text in rows[: args.count]:
            file.write(json.dumps({"messages": [{"role": "user", "content": text}], "category": category}, ensure_ascii=False) + "\n")
    print(f"{args.output}: {args.count} of {len(rows)} prompts")


if __name__ == "__main__":
    run_main(main)
