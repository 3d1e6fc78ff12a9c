-- Functions and constants of the scripts, for prelude.lua, meter.lua, the strategies and check.lua.

local KEYS, ARGV = KEYS, ARGV
local encode, decode = struct.pack, struct.unpack
local byte, sub = string.byte, string.sub
local floor, ceil, min, max = math.floor, math.ceil, math.min, math.max
local redis_pcall = redis.pcall

-- The longest time in microseconds for which a turn may be taken ahead (a day), and the maximum ticks of a debt.
local DAY, MAX_TICKS = 86400000000, 2 ^ 52

-- Sums and expiries are stored modulo WRAP. Two stored values that are compared differ by less than WRAP.
local WRAP = 2 ^ 40

-- An upper bound for the TTL of a key, in milliseconds (4 years). A state with a later expiry was written by another
-- program.
local LONGEST = 2 ^ 37

-- Maximum number of keys that one command reads, and of numbers packed in one call: Lua passes at most 8,000 values to
-- a function.
local MOST = 4000
