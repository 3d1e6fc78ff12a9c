-- Reads the blocks that have changed.
--
-- KEYS   as in block.lua
-- ARGV   the time of the last change that the reader has seen, in microseconds since the Unix epoch, 0 for none; the
--        maximum number of changes in the reply; 0
-- Reply  a list of texts: the time in milliseconds since the Unix epoch; the time of the last change, or 0 for none; then
--        for each change, in order: the caller; the time of the change; the end of the block. If the block was ended early,
--        a byte 0 precedes the caller

local time = redis.call('TIME')
local last = redis.call('ZREVRANGE', KEYS[2], '0', '0', 'WITHSCORES')[2] or '0'
local reply = { string.format('%.0f', time[1] * 1000 + math.floor(time[2] / 1000)), last }
local changed =
  redis.call('ZRANGEBYSCORE', KEYS[2], '(' .. ARGV[1], '+inf', 'WITHSCORES', 'LIMIT', '0', ARGV[2])
for i = 1, #changed, 2 do
  local caller = changed[i]
  reply[#reply + 1] = caller
  reply[#reply + 1] = changed[i + 1]
  reply[#reply + 1] = redis.call('ZSCORE', KEYS[1], caller) or '0'
end
return reply
