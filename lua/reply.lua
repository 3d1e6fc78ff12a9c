-- The reply, once all is decided.

-- Replaces the answers to failed checks by the reason, a number below 0. It searches for words of all versions from 6.2. A
-- missing right is NO_PERMISSION less the place of its command in this list, which Rust has too.
local RIGHTS = failures and {
  'MGET', 'SET', 'SETRANGE', 'DEL', 'LRANGE', 'RPUSH', 'LSET', 'LTRIM', 'LREM', 'PEXPIREAT', 'ZCARD', 'ZRANGE',
  'ZREMRANGEBYSCORE', 'ZSCORE', 'ZADD', 'ZREM',
}
while failures do
  local function says(words)
    return string.find(failures.err, words, 1, true)
  end
  local problem = REFUSED
  if says('OOM') then
    problem = OUT_OF_MEMORY
  elseif says('READONLY') then
    problem = READ_ONLY
  elseif says('NOPERM') or says('ermission') or says("can't run this command") then
    problem = NO_PERMISSION
    for place, command in ipairs(RIGHTS) do
      if string.match(failures.err, '^%u+') == command then
        problem = NO_PERMISSION - place
      end
    end
  elseif says('MISCONF') or says('NOREPLICAS') then
    -- It takes no writes at all: it cannot save to disk, or has too few replicas.
    problem = NO_WRITES
  elseif says('non local key') then
    -- The slot is being moved away, and this call has deleted a key of the check: no node makes it anew here. Nothing of the
    -- check was written, which reads its keys first.
    problem = ELSEWHERE
  end
  for i = failures.from + 1, failures.to, 4 do
    reply[i], reply[i + 1], reply[i + 2], reply[i + 3] = problem, 0, 0, 0
  end
  failures = failures.before
end

-- One string is read faster than a list of numbers.
replied = replied + 1
reply[replied] = now
local packed = ''
for from = 1, replied, MOST do
  local to = min(replied, from + MOST - 1)
  packed = packed .. encode('<' .. string.rep('i8', to - from + 1), unpack(reply, from, to))
end
return packed
