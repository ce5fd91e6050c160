"""Forty questions about eight texts, five in a conversation about each. Everything in them is made up."""

from __future__ import annotations

INSTRUCTION = "You answer questions about a text. You answer with a few words, and only with what the text says."

QUESTION_SET: tuple[tuple[str, tuple[tuple[str, str], ...]], ...] = (
    (
        "The lighthouse of Ardmore stands on a rock two miles off the coast. It was built in 1871 by Hedda "
        "Lund, a captain who had sold her ship to pay for the stones. For the first nine years its lamp "
        "burned oil from the mill at Corran; then a gas line was laid from the harbour. The keeper lived "
        "below the lamp with a goat, because no cow would cross the water. In the storm of 1904 the sea broke"
        " the north window and put out the light for six hours, and the ferry Marigold ran onto the sandbank."
        " Nobody drowned. Since 1952 the light has been electric, and the keeper's room is a small museum of "
        "knots.",
        (
            ("Who built the lighthouse?", "Hedda Lund"),
            ("In which year was it built?", "1871"),
            ("Which animal did the keeper have?", "goat"),
            ("What was the name of the ferry that ran onto the sandbank?", "Marigold"),
            ("What is shown in the keeper's room today?", "knots"),
        ),
    ),
    (
        "Pension Alder has eleven rooms on three floors. Breakfast is served from half past six until ten in "
        "the winter garden; on Sundays it ends at eleven. Guests who arrive after nine in the evening find "
        "their key in the blue box beside the bakery next door, and the code is sent to them in a message at "
        "noon. Dogs are welcome on the ground floor only and cost eight crowns a night. Bicycles are kept in "
        "the old stable, which Mr Petrak locks at ten. The sauna is heated on Wednesdays and Saturdays. A "
        "room can be cancelled without cost until three days before; after that one night has to be paid.",
        (
            ("How many rooms does the pension have?", "eleven"),
            ("Where is breakfast served?", "winter garden"),
            ("What does a dog cost per night?", "eight crowns"),
            ("Who locks the stable?", "Mr Petrak"),
            ("On which days is the sauna heated?", "Wednesdays and Saturdays"),
        ),
    ),
    (
        "The pump P4 moves water from the lower basin to the tower. It starts when the level in the tower "
        "falls below 2.5 metres and stops at 4 metres. If the motor becomes warmer than 85 degrees, the "
        "controller switches it off and lights the red lamp on panel C. In that case wait twenty minutes, "
        "clean the filter behind the grey flap, and press the button marked RESET for three seconds. A yellow"
        " lamp means that the oil has to be changed, which is due every 600 hours; use oil of grade 46 only. "
        "The pump was made by Varga and Sons and has been in service since March 2011. Spare seals are in "
        "cupboard 17.",
        (
            ("Below which level does the pump start?", "2.5 metres"),
            ("What colour is the lamp when the motor is too warm?", "red"),
            ("How long must one wait before the reset?", "twenty minutes"),
            ("Which grade of oil is used?", "46"),
            ("Who made the pump?", "Varga and Sons"),
        ),
    ),
    (
        "At the meeting of the reading circle on the fourth of May seven members were present; Odile was ill "
        "and Benno came late. The circle decided with five votes to two to read The Glass Orchard next, and "
        "not the diaries of the sailor Ruis. Tamsin will bring the books, which cost fourteen francs each, "
        "and collect the money at the door. The next meeting is on the first of June in the library and no "
        "longer in the tea room, which is being painted. Ivo asked that nobody tell the ending before the "
        "last half hour. Benno offered to bake a lemon cake, and the circle accepted that without a vote.",
        (
            ("How many members were present?", "seven"),
            ("Which book will be read next?", "The Glass Orchard"),
            ("What does a book cost?", "fourteen francs"),
            ("Where is the next meeting?", "library"),
            ("What will Benno bake?", "lemon cake"),
        ),
    ),
    (
        "The grey reed hen lives in the marshes along the river Ossa. It is about as long as a hand, weighs "
        "ninety grams, and is hardly ever seen, for it walks between the stems and seldom flies. Its call, "
        "three short whistles and a rattle, is heard at dusk from April on. The hen lays five eggs into a "
        "nest of sedge that floats on the water, and both parents sit on them for nineteen days. It eats "
        "snails, the larvae of dragonflies and in autumn the seeds of rushes. In 1990 there were forty pairs;"
        " since the dam at Lisk was opened every spring there are more than three hundred. In winter the "
        "birds fly south to the lakes of Tamar.",
        (
            ("How much does the bird weigh?", "ninety grams"),
            ("How many eggs does it lay?", "five"),
            ("How long do the parents sit on the eggs?", "nineteen days"),
            ("How many pairs were there in 1990?", "forty"),
            ("Where do the birds fly in winter?", "Tamar"),
        ),
    ),
    (
        "For the bread of Sella you need 500 grams of rye flour, 300 grams of wheat flour, 18 grams of salt, "
        "a spoon of caraway and a cup of sour dough. Mix the dough with warm water in the evening and let it "
        "stand beside the stove under a cloth. In the morning add the flour and the salt, knead it for twelve"
        " minutes and let it rise for two hours. Brush the loaf with cold coffee, which gives the dark crust,"
        " and cut a cross into the top. Bake it at 240 degrees for a quarter of an hour and at 190 degrees "
        "for fifty minutes more. The bread is best on the third day and keeps for two weeks in a box of wood.",
        (
            ("How much rye flour is needed?", "500 grams"),
            ("Which spice is in the bread?", "caraway"),
            ("How long is it kneaded?", "twelve minutes"),
            ("What is the loaf brushed with?", "cold coffee"),
            ("On which day is the bread best?", "third"),
        ),
    ),
    (
        "The tram line 9 runs from the Foundry to Saint Agnes in thirty-four minutes and has twenty-one "
        "stops. The first car leaves at ten past five, the last one at half past midnight; by day there is "
        "one every eight minutes. Line 9 was opened in 1926 with horses because the wires had been stolen, "
        "and was electric from the autumn on. The green cars were built in Ferrol and have seats of ash wood."
        " At the stop Old Weir passengers change to the boat to the islands, which takes the same ticket. A "
        "ticket costs two marks and is valid for ninety minutes; children under seven travel free. Lost "
        "things are kept at Foundry.",
        (
            ("How many stops does the line have?", "twenty-one"),
            ("In which year was it opened?", "1926"),
            ("Where were the green cars built?", "Ferrol"),
            ("At which stop does one change to the boat?", "Old Weir"),
            ("How long is a ticket valid?", "ninety minutes"),
        ),
    ),
    (
        "In the game of Harrow two players sit on opposite sides of a board with nine times nine squares. "
        "Each has twelve stones, one of which, the plough, carries a notch. A stone moves one square in any "
        "straight direction; the plough moves as far as it likes but never slantwise. A stone is taken when "
        "it stands between two others of the opponent. Whoever loses the plough may play on but must say so "
        "aloud. The game ends when a player has fewer than four stones, or when the plough reaches the far "
        "edge, which counts double. Black begins. The oldest board was found in a well in Quern and is made "
        "of slate.",
        (
            ("How many stones does each player have?", "twelve"),
            ("What is the stone with the notch called?", "plough"),
            ("Who begins?", "Black"),
            ("Where was the oldest board found?", "Quern"),
            ("What is it made of?", "slate"),
        ),
    ),
)
"""A text, and questions about it with their answers."""
