-- The problem of each failure, a number below 0, by the words of its error in all versions from 6.2. A missing right is
-- NO_PERMISSION less the place of its command in this list, which Rust has too. Uses `failures`.

local RIGHTS = failures and {
  'MGET', 'SET', 'SETRANGE', 'DEL', 'LRANGE', 'RPUSH', 'LSET', 'LTRIM', 'LREM', 'PEXPIREAT', 'ZCARD', 'ZRANGE',
  'ZREMRANGEBYSCORE', 'ZSCORE', 'ZADD', 'ZREM',
}
local failure = failures
while failure do
  local err, problem = failure.err, REFUSED
  local function says(words)
    return string.find(err, words, 1, true)
  end
  if says('OOM') then
    problem = OUT_OF_MEMORY
  elseif says('READONLY') then
    problem = READ_ONLY
  elseif says('NOPERM') or says('ermission') or says("can't run this command") then
    problem = NO_PERMISSION
    for place, command in ipairs(RIGHTS) do
      if string.match(err, '^%u+') == command then
        problem = NO_PERMISSION - place
      end
    end
  elseif says('MISCONF') or says('NOREPLICAS') then
    -- It takes no writes at all: it cannot save to disk, or has too few replicas.
    problem = NO_WRITES
  elseif says('non local key') then
    -- The slot is being moved away, and this call has deleted a key of the check, so that no node creates the key here again.
    -- Nothing of the check was written: it reads its keys first.
    problem = ELSEWHERE
  end
  failure.problem, failure = problem, failure.before
end
