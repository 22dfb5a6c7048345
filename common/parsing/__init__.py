"""Text of a model -> events: thoughts, answers, calls of tools.

An answer is read by generators, one inside the other, from a `Scanner` that gets the text as it is generated:

    events.py      a stream of the engine's events -> the same with thoughts and calls told apart
    answer.py      AnswerParser: feed text, get pieces, end
    dialect.py     Dialect: how a model writes a whole answer; tags.py with layout.py, and on messages.py harmony.py and
                   glimmer.py
    formats/       ToolFormat: how a model writes calls within an answer, one file each; the table is in registry.py
    detection.py   settings, chat template and special tokens -> dialect and format; evidence.py makes a template write
    grammar.py     what an answer must look like -> constraints in the model's own dialect and format
                   frames.py: a whole answer in each dialect; lark.py, alternatives.py: what grammars are made of
"""
