-- The prelude: what every strategy and the driver use.
--
-- Time is Redis's own, in whole microseconds since the Unix epoch. All numbers are whole and below 2^53, where a
-- double is exact; the quotient of two such numbers, rounded down, is exact too.

local call, pcall = redis.call, redis.pcall
local pack, unpack = struct.pack, struct.unpack
local floor, min, max = math.floor, math.min, math.max

-- The strategies by their number; see twins! in src/limit/strategy/mod.rs.
local strategies = {}

-- a / b, rounded up.
local function div_ceil(a, b)
  return -floor(-a / b)
end

-- The two numbers stored under a key; 0 and 0 if there is no such key, or something that is not ours.
local function read(key)
  local value = pcall('GET', key)
  if type(value) == 'string' and #value == 16 then
    return unpack('<i8i8', value)
  end
  return 0, 0
end

-- Stores two numbers until the first millisecond in which they say nothing any more. Returns an error, or nothing.
local function write(key, a, b, fresh_at)
  local reply = pcall('SET', key, pack('<i8i8', a, b), 'PXAT', div_ceil(fresh_at, 1000))
  return reply.err
end

-- Removes a key. Returns an error, or nothing.
local function erase(key)
  local reply = pcall('DEL', key)
  return type(reply) == 'table' and reply.err or nil
end
