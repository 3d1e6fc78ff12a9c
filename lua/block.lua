-- Blocks a caller, or ends a block.
--
-- KEYS   a sorted set of the blocked callers; the score is the end of the block, in milliseconds since the Unix epoch
--        a sorted set of the same callers; the score is the time of the last change, in microseconds since the Unix
--        epoch. For an hour after a block was ended early, both sets have its caller behind a byte 0
-- ARGV   the caller; 1 to extend a block, 0 to keep it; the maximum number of blocks; the milliseconds of the block, 0 to
--        end it. With 1, the end is a change even without a block here: other instances may know a block that Redis has lost
-- Reply  1 if this changes something, else 0

-- Maximum number of expired callers that a call removes: more than a call adds.
local REMOVED = 100
-- Minimum milliseconds for which a change is kept: instances read the changes twice a second.
local KEPT = 3600000

local ends, changes, caller, length = KEYS[1], KEYS[2], ARGV[1], tonumber(ARGV[4])
local ended = '\0' .. caller
local function text(number)
  return string.format('%.0f', number)
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local last = redis.call('ZREVRANGE', changes, '0', '0', 'WITHSCORES')[2]
-- Unique, since instances read the changes after a time.
local change = math.max(time[1] * 1000000 + time[2], (tonumber(last) or 0) + 1)

local expired = redis.call('ZRANGEBYSCORE', ends, '-inf', text(now), 'LIMIT', '0', text(REMOVED))
if #expired > 0 then
  redis.call('ZREM', ends, unpack(expired))
  redis.call('ZREM', changes, unpack(expired))
end

if length == 0 then
  if redis.call('ZREM', ends, caller) == 0 and ARGV[2] == '0' then
    return 0
  end
  redis.call('ZREM', changes, caller)
  redis.call('ZADD', ends, text(now + KEPT), ended)
  redis.call('ZADD', changes, text(change), ended)
else
  local stop, former = now + length, tonumber(redis.call('ZSCORE', ends, caller))
  if former and former > now and (ARGV[2] == '0' or former >= stop) then
    return 0
  end
  redis.call('ZREM', ends, ended)
  redis.call('ZREM', changes, ended)
  redis.call('ZADD', ends, text(stop), caller)
  redis.call('ZADD', changes, text(change), caller)
  if redis.call('ZCARD', ends) > tonumber(ARGV[3]) then
    redis.call('ZREM', changes, redis.call('ZPOPMIN', ends)[1])
  end
end

local latest = tonumber(redis.call('ZREVRANGE', ends, '0', '0', 'WITHSCORES')[2]) or now
redis.call('PEXPIREAT', ends, text(latest))
redis.call('PEXPIREAT', changes, text(math.max(latest, now + KEPT)))
return 1
