"""The names and nouns in nano's conversations. Each is one token of the vocabulary with a space before it."""


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


NAMES: tuple[str, ...] = _words("""
Adam Alan Alex Alice Amy Andy Anna Anton Ben Beth Betty Bill Bob Bruno Carl Carol Cathy Clara Colin Cora Dan Daisy
David Dean Diana Dora Doris Edgar Edith Ella Emil Emma Eric Erin Ernie Eva Faye Felix Fiona Flora Frank Fred Gary
Gina Grace Grant Greta Hank Hans Harry Hazel Heidi Helen Henry Hugo Ian Ida Igor Ines Iris Ivan Jack Jane Jason Jean
Jenny Jim Joan Joel John Judy Julia Karen Karl Kate Keith Ken Kevin Kim Kurt Lara Laura Lea Leo Lena Lily Linda Lisa
Lola Louis Lucy Luke Marco Maria Mark Mary Max Mia Mike Mila Mona Nadia Nancy Nick Nina Noah Nora Olga Oscar Otto Owen
Pablo Pam Paul Pedro Peter Petra Phil Ralph Ray Rita Robin Roger Rosa Ruth Ryan Sally Sam Sara Scott Sean Simon Sofia
Steve Susan Tania Ted Tim Tina Tom Tony Uma Vera Victor Wanda Will Zoe
""")

ANIMALS: tuple[str, ...] = _words("""
ant bat bear bee bird camel cat chicken cow crab crow deer dog dolphin donkey duck eagle elephant fish fly fox frog
goat goose hen horse kangaroo lamb lion lizard monkey mouse otter owl panda parrot pig rabbit rat seal shark sheep
snail snake spider swan tiger turtle whale wolf zebra
""")
FRUITS: tuple[str, ...] = _words("""
apple banana bean carrot cherry corn fig grape lemon lime mango melon nut olive onion orange peach pear pepper plum
potato pumpkin radish rice strawberry tomato
""")
COLORS: tuple[str, ...] = _words("red blue green yellow black white pink gray brown purple gold silver")
THINGS: tuple[str, ...] = _words("""
anchor apron arrow axe ball basket bed bell belt bench bike blanket boat book boot bottle bowl box bread brick bridge
brush bucket bus butter button cake camera candle car card carpet castle chain chair chalk cheese clock cloud coat
coin comb cup curtain desk dice door dress drum engine fan feather fence flag flute fork garden glass glove guitar
hammer hat helmet honey hook house ice jacket jar kettle key kite knife ladder lamp leaf letter lock magnet map mask
medal milk mirror moon nail needle net oven paint pan paper pen pencil piano pillow pipe pizza plate pocket pot purse
puzzle radio rain ribbon ring river road robot rocket roof rope ruler salt sand saw scarf shell ship shirt shoe shovel
sink snow soap sock sofa soup spoon stamp star stone stove sugar sun sword table tent ticket tie towel tower toy train
tray tree truck tube vase violin wagon wall watch water wheel whistle window wire wood wool
""")

VALUES: tuple[str, ...] = tuple(dict.fromkeys((*ANIMALS, *FRUITS, *COLORS, *THINGS)))
"""What a key may stand for, what is sorted, counted and spelled."""

PLACES: tuple[str, ...] = _words(
    "garden kitchen park school street station market library hotel forest field office museum harbor valley"
)
JOBS: tuple[str, ...] = _words("pirate teacher doctor farmer wizard robot sailor king cook poet knight nurse")
ENDINGS: tuple[str, ...] = _words("over please friend indeed done okay cheers amen")
EVENTS: tuple[str, ...] = _words("lunch dinner meeting party concert lesson class game walk call exam visit")
EXTRA: tuple[str, ...] = _words("""
air baby bag bank beach big bone boy brother bug child city clean cold corner country day dream ear east egg end eye
face family farm father fast finger fire floor flower food foot friend girl grass green hair hand happy head heart
hill home hot hour island job king land leg light long love lunch man money month morning mother mountain music name
new night nose north number ocean old open party people picture place plane plant queen question room sad school sea
shop short sister sky sleep slow small smile song south space sport story street strong summer teacher time tooth
town vegetable village voice warm week west wind winter woman word work world year young
""")
SPELLED: tuple[str, ...] = tuple(dict.fromkeys((*VALUES, *EXTRA)))
"""The words that are spelled: 400 and some."""
