"""Every wording of the training prompts, none of them the evaluation's.

At least eight paraphrases of each part, so that the model learns the request and not a phrase.
`{what}` names the thing that is sought in singular or plural, `{keys}` the keys asked for.
"""

# Retrieval: (adjective, {kind of value: (singular, plural)}) used through a whole prompt.
ADJECTIVES = (
    "secret",
    "hidden",
    "registered",
    "lucky",
    "private",
    "assigned",
    "unusual",
    "recorded",
    "special magic",
    "magic",
)
NOUNS = {
    "numbers": (("number", "numbers"), ("code", "codes"), ("figure", "figures")),
    "uuids": (("uuid", "uuids"), ("identifier", "identifiers"), ("id", "ids")),
    "words": (("word", "words"), ("password", "passwords"), ("name", "names")),
}
# {one}: the thing in singular, {many}: in plural
NEEDLES = (
    "The {one} of {key} is {value}.",
    "A {one} for {key} reads: {value}.",
    "Note that {key} has been given the {one} {value}.",
    "Among the {many} kept for {key} is {value}.",
    "One of the {many} of {key} reads {value}.",
    "Remember this: {value} is a {one} for {key}.",
    "For {key}, one of the {many} is: {value}.",
    "{key} goes with the {one} {value}.",
    "Somebody wrote down {value} as a {one} for {key}.",
    "One {one} that belongs to {key} is: {value}.",
    "Here is one of the {many} for {key}: {value}.",
    "It is on record that a {one} for {key} equals {value}.",
)
RETRIEVAL_INSTRUCTIONS = (
    "Read the text below with care. It contains {what}, which you will be asked for.",
    "Somewhere in this text {what} can be found. Memorise what you find.",
    "The passage that follows mentions {what}. Afterwards there is a question.",
    "Below is a long text with {what} in it; keep track of every one.",
    "Some {what} are concealed in the material below. You will need them later.",
    "Look out for {what} while you read. I shall quiz you at the end.",
    "Here comes a document. Store any {what} that it states.",
    "Your job is to find {what} in what follows.",
    "",
)
RETRIEVAL_QUESTIONS = (
    "Which {what} did the text give for {keys}?",
    "What {is_are} the {what} of {keys} according to the passage?",
    "Please state the {what} for {keys}.",
    "Tell me the {what} mentioned for {keys}.",
    "From the document: the {what} of {keys}?",
    "Question: what {is_are} the {what} for {keys}?",
    "Recall the {what} that belonged to {keys}.",
    "List the {what} stated above for {keys}.",
    "What {is_are} all the {what} for {keys} found in the document?",
)
RETRIEVAL_PREFIXES = (
    " The {what} for {keys} {is_are}",
    " According to the passage, the {what} of {keys} {is_are}",
    " For {keys}, the text gives the {what}",
    " The {what} that the text gives for {keys} {is_are}",
    " Answer:",
    " Here {is_are} the {what} for {keys}:",
    " The document names the {what}",
    " The {what} for {keys} mentioned in the document {is_are}",
)
LISTS = (", ", " and ")  # between values; the last pair is joined by " and " in both

# Variable tracking: (first statement, later statement); {a} gets {value} or the value of {b}.
ASSIGNMENTS = (
    ("LET {a} = {value}", "LET {a} = LET {b}"),
    ("SET {a} := {value}", "SET {a} := {b}"),
    ("REG {a} = {value}", "REG {a} = REG {b}"),
    ("{a} <- {value}", "{a} <- {b}"),
    ("DEF {a} AS {value}", "DEF {a} AS {b}"),
    ("VAL {a} = {value}", "VAL {a} = VAL {b}"),
    ("variable {a} is {value}", "variable {a} is variable {b}"),
    ("STORE {value} IN {a}", "STORE {b} IN {a}"),
    ("CELL {a} = {value}", "CELL {a} = CELL {b}"),
)
TRACKING_INSTRUCTIONS = (
    "Below, values are stored under names and copied from name to name. Keep track of them.",
    "The text contains assignments. Trace which names end up with which value.",
    "Follow the chain of assignments that is scattered in this text.",
    "Some lines of the text hand a value from one name to the next. Note them all.",
    "Track every name and the value it receives.",
    "In the lines that follow, names are given values, directly or through other names.",
    "Find the assignments among the filler and work out the value of every name.",
    "Keep a table of names and values while you read.",
)
TRACKING_QUESTIONS = (
    "Question: which names hold the value {value}?",
    "Which of the names above were given {value}, directly or not?",
    "List every name whose value is {value}.",
    "Question: Name all that equal {value}.",
    "What are the names that carry {value} in the end?",
    "Find all names that are assigned the value {value} in the text.",
    "Question: Who received {value}?",
    "Which names lead back to {value}?",
)
TRACKING_PREFIXES = (
    " Answer: The {count} names with the value {value} are:",
    " Answer:",
    " {count} names hold {value}:",
    " The names that were given {value} are:",
    " Answer: In the text, {value} is held by {count} names, namely:",
    " These {count} names carry {value}:",
    " According to the assignments, the names with {value} are:",
    " Answer: the value {value} belongs to",
)

# Common words
COUNTING_INSTRUCTIONS = (
    "Here is a long list with numbers. A few entries recur far more often than the rest.",
    "Count how often each entry of the list below occurs.",
    "Study the list. Some entries are much more frequent.",
    "The list that follows repeats itself; find out what it repeats most.",
    "Go through this list and tally its entries.",
    "Below is a list of terms in random order. Pay attention to repeated ones.",
    "Look for the favourites of this list.",
    "Keep a tally of the following entries.",
)
COUNTING_QUESTIONS = (
    "Question: What are the {count} most frequent entries of the list?",
    "Name the {count} entries that occurred most.",
    "Question: Which {count} terms were repeated most frequently?",
    "Give the {count} favourites of the list.",
    "Which {count} entries lead the tally?",
    "Question: What are the {count} most common entries in the list?",
    "List the {count} top terms by number of occurrences.",
    "Which {count} entries recur most in what you read?",
)
COUNTING_PREFIXES = (
    " Answer: The {count} most frequent entries are:",
    " Answer:",
    " The top {count} terms are:",
    " Answer: These {count} were repeated most:",
    " By number of occurrences, the {count} leaders are:",
    " The tally is led by:",
    " Answer: The list's {count} favourites are:",
    " The {count} entries seen most are:",
)

# Frequent coded words; {filler} is the noise symbol
CIPHER_INSTRUCTIONS = (
    "This is an encrypted message. Determine its most frequent terms.",
    "The following letters are in cipher. Track how frequent each group is.",
    "Below is text from an unknown language. Count its words.",
    "Analyse the frequency of the symbols in this cipher text.",
    "Here is a coded transmission; some groups recur.",
    "Tally the groups of letters in the following transmission.",
    "Read the scrambled text below and find what it repeats.",
    "Nobody can read this text, but its words can be counted.",
)
CIPHER_QUESTIONS = (
    'Question: Ignoring "{filler}", what are the {count} most frequent groups?',
    'Apart from "{filler}", which {count} groups recur most?',
    'Question: Name the {count} most common terms of the message. "{filler}" does not count.',
    'Disregard "{filler}". Which {count} groups lead the tally?',
    'Question: What are the top {count} terms, not counting "{filler}"?',
    'Give the {count} groups with the most occurrences, without "{filler}".',
    'Which {count} symbols other than "{filler}" appear most frequently?',
    'Question: "{filler}" is only noise. What {count} groups are the most frequent?',
)
CIPHER_PREFIXES = (
    " Answer: The {count} most frequent groups are:",
    " Answer:",
    " The top {count} are:",
    " Answer: Not counting the noise, the {count} most common are:",
    " These {count} groups recur most:",
    " The tally is led by:",
    " Answer: The message repeats mostly",
    " The {count} leading terms are:",
)
FILLERS = ("***", "--", "###", "....", "__", "~~~", "??", "//")

NUMBER_WORDS = {
    2: "two",
    3: "three",
    4: "four",
    5: "five",
    6: "six",
    7: "seven",
    8: "eight",
    9: "nine",
    10: "ten",
    11: "eleven",
    12: "twelve",
}

# Noise: paragraphs of short sentences, over and over. {thing} {quality}; then a closing phrase.
THINGS = (
    *("river", "hill", "door", "lamp", "snow", "road", "barn", "wind", "kettle", "harbour"),
    *("clock", "field", "moon", "roof", "stone", "train", "bread", "cat", "window", "rain"),
)
QUALITIES = (
    *("cold", "steep", "shut", "bright", "white", "long", "red", "strong", "warm", "quiet"),
    *("old", "wide", "round", "grey", "heavy", "late", "fresh", "asleep", "open", "soft"),
)
NOISE_SENTENCES = (
    "The {thing} is {quality}.",
    "The {thing} was {quality} today.",
    "A {thing} can be {quality}.",
    "My {thing} stays {quality}.",
)
CLOSINGS = (
    "On we go.",
    "Up and down.",
    "Round and round again.",
    "And so it goes.",
    "One more time.",
    "Off they went.",
    "That is all.",
    "Over the hills and far.",
)
