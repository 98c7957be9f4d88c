"""The facts that nano knows: small closed tables, as text with one or a few facts per line."""


def _rows(text: str) -> tuple[tuple[str, ...], ...]:
    """Split facts at `;` or line ends, and the fields of each at `,`."""
    facts = (fact.strip() for line in text.strip().splitlines() for fact in line.split(";"))
    return tuple(tuple(field.strip() for field in fact.split(",")) for fact in facts if fact)


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


COUNTRIES: tuple[tuple[str, ...], ...] = _rows(
    """
Albania, Tirana, Europe; Algeria, Algiers, Africa; Angola, Luanda, Africa; Argentina, Buenos Aires, South America
Armenia, Yerevan, Asia; Australia, Canberra, Oceania; Austria, Vienna, Europe; Belgium, Brussels, Europe
Bolivia, Sucre, South America; Brazil, Brasilia, South America; Bulgaria, Sofia, Europe; Cambodia, Phnom Penh, Asia
Canada, Ottawa, North America; Chile, Santiago, South America; China, Beijing, Asia; Colombia, Bogota, South America
Croatia, Zagreb, Europe; Cuba, Havana, North America; Cyprus, Nicosia, Europe; Denmark, Copenhagen, Europe
Ecuador, Quito, South America; Egypt, Cairo, Africa; Estonia, Tallinn, Europe; Ethiopia, Addis Ababa, Africa
Fiji, Suva, Oceania; Finland, Helsinki, Europe; France, Paris, Europe; Georgia, Tbilisi, Asia; Germany, Berlin, Europe
Ghana, Accra, Africa; Greece, Athens, Europe; Haiti, Port-au-Prince, North America; Hungary, Budapest, Europe
Iceland, Reykjavik, Europe; India, New Delhi, Asia; Indonesia, Jakarta, Asia; Iran, Tehran, Asia; Iraq, Baghdad, Asia
Ireland, Dublin, Europe; Israel, Jerusalem, Asia; Italy, Rome, Europe; Jamaica, Kingston, North America
Japan, Tokyo, Asia; Jordan, Amman, Asia; Kenya, Nairobi, Africa; Laos, Vientiane, Asia; Latvia, Riga, Europe
Lebanon, Beirut, Asia; Libya, Tripoli, Africa; Lithuania, Vilnius, Europe; Malaysia, Kuala Lumpur, Asia
Mali, Bamako, Africa; Malta, Valletta, Europe; Mexico, Mexico City, North America; Mongolia, Ulaanbaatar, Asia
Morocco, Rabat, Africa; Nepal, Kathmandu, Asia; Netherlands, Amsterdam, Europe; New Zealand, Wellington, Oceania
Nigeria, Abuja, Africa; Norway, Oslo, Europe; Pakistan, Islamabad, Asia; Peru, Lima, South America
Philippines, Manila, Asia; Poland, Warsaw, Europe; Portugal, Lisbon, Europe; Romania, Bucharest, Europe
Russia, Moscow, Europe; Rwanda, Kigali, Africa; Senegal, Dakar, Africa; Serbia, Belgrade, Europe
Slovakia, Bratislava, Europe; Slovenia, Ljubljana, Europe; Somalia, Mogadishu, Africa; Spain, Madrid, Europe
Sudan, Khartoum, Africa; Sweden, Stockholm, Europe; Switzerland, Bern, Europe; Syria, Damascus, Asia
Thailand, Bangkok, Asia; Tunisia, Tunis, Africa; Turkey, Ankara, Asia; Uganda, Kampala, Africa; Ukraine, Kyiv, Europe
Uruguay, Montevideo, South America; Venezuela, Caracas, South America; Vietnam, Hanoi, Asia; Zambia, Lusaka, Africa
"""
)
"""Country, capital, continent. `with_article` says which countries take "the"."""

COLORS_OF: tuple[tuple[str, ...], ...] = _rows(
    """
a banana, yellow; grass, green; snow, white; coal, black; the sky, blue; blood, red; a lemon, yellow; milk, white
an orange, orange; a carrot, orange; a tomato, red; a frog, green; a crow, black; a swan, white; an elephant, gray
a pig, pink; chocolate, brown; a polar bear, white; the sun, yellow; a plum, purple; a cherry, red; salt, white
a lime, green; a pumpkin, orange; a strawberry, red; wood, brown; cotton, white; a leaf, green; the sea, blue
"""
)
SOUNDS: tuple[tuple[str, ...], ...] = _rows(
    """
dog, woof; cat, meow; cow, moo; sheep, baa; pig, oink; duck, quack; horse, neigh; lion, roar; snake, hiss; bee, buzz
owl, hoot; mouse, squeak; frog, croak; crow, caw; donkey, hee-haw; wolf, howl; chicken, cluck; bird, tweet; goose, honk
"""
)
LEGS: tuple[tuple[str, ...], ...] = _rows(
    """
spider, 8; ant, 6; bee, 6; dog, 4; cat, 4; horse, 4; cow, 4; bird, 2; snake, 0; fish, 0; crab, 10; fly, 6; chicken, 2
elephant, 4; frog, 4; owl, 2; mouse, 4; snail, 0; tiger, 4; duck, 2; pig, 4; whale, 0; swan, 2; lizard, 4; zebra, 4
"""
)
SYMBOLS: tuple[tuple[str, ...], ...] = _rows(
    """
hydrogen, H; helium, He; lithium, Li; carbon, C; nitrogen, N; oxygen, O; fluorine, F; neon, Ne; sodium, Na
magnesium, Mg; aluminum, Al; silicon, Si; phosphorus, P; sulfur, S; chlorine, Cl; argon, Ar; potassium, K; calcium, Ca
titanium, Ti; iron, Fe; nickel, Ni; copper, Cu; zinc, Zn; bromine, Br; silver, Ag; tin, Sn; iodine, I; gold, Au
mercury, Hg; lead, Pb; uranium, U; platinum, Pt
"""
)
OPPOSITES: tuple[tuple[str, ...], ...] = _rows(
    """
hot, cold; big, small; fast, slow; old, new; happy, sad; up, down; left, right; day, night; black, white; long, short
high, low; wet, dry; hard, soft; open, closed; full, empty; light, dark; rich, poor; strong, weak; good, bad
early, late; near, far; clean, dirty; thick, thin; loud, quiet; sweet, sour; true, false; first, last
love, hate; in, out; on, off; north, south; east, west; inside, outside; begin, end; win, lose; buy, sell
push, pull; give, take; come, go; always, never; before, after; summer, winter; friend, enemy; question, answer
"""
)
YOUNG: tuple[tuple[str, ...], ...] = _rows(
    """
dog, puppy; cat, kitten; cow, calf; sheep, lamb; horse, foal; pig, piglet; duck, duckling; bear, cub; goat, kid
chicken, chick; goose, gosling; deer, fawn; kangaroo, joey; frog, tadpole; swan, cygnet; owl, owlet
"""
)
DAYS: tuple[str, ...] = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS: tuple[str, ...] = _words(
    "January February March April May June July August September October November December"
)
TRIVIA: tuple[tuple[str, ...], ...] = _rows(
    """
largest planet, Jupiter; smallest planet, Mercury; red planet, Mars; largest ocean, the Pacific
largest animal, the blue whale; fastest animal, the cheetah; tallest animal, the giraffe; highest mountain, Everest
longest river, the Nile; largest country, Russia; smallest country, Vatican City; largest desert, Antarctica
first month, January; last month, December; hottest planet, Venus; closest star, the Sun; first letter, A
last letter, Z; king of animals, the lion; coldest continent, Antarctica; largest continent, Asia
lightest element, hydrogen; smallest continent, Australia; third planet, Earth; planet with rings, Saturn
"""
)
HOW_MANY: tuple[tuple[str, ...], ...] = _rows(
    """
days, a week, 7; months, a year, 12; hours, a day, 24; minutes, an hour, 60; seconds, a minute, 60; days, a year, 365
weeks, a year, 52; items, a dozen, 12; sides, a triangle, 3; sides, a square, 4; years, a century, 100
letters, the alphabet, 26; players, a football team, 11; cents, a dollar, 100; fingers, a hand, 5; wheels, a car, 4
wheels, a bike, 2; strings, a violin, 4; strings, a guitar, 6; colors, a rainbow, 7; planets, the solar system, 8
"""
)
CHINESE: tuple[tuple[str, ...], ...] = _rows(
    """
中国, 北京; 法国, 巴黎; 日本, 东京; 英国, 伦敦; 德国, 柏林; 意大利, 罗马; 西班牙, 马德里; 俄国, 莫斯科; 美国, 华盛顿
"""
)
"""Country and capital."""
CHINESE_COLORS: tuple[tuple[str, ...], ...] = _rows("天空, 蓝色; 草, 绿色; 雪, 白色; 血, 红色; 香蕉, 黄色; 煤, 黑色")


def with_article(country: str) -> str:
    """Return the country's name as it is written inside a sentence."""
    return f"the {country}" if country in ("Netherlands", "Philippines") else country
