-- Maps the errors in `failures` to problems, which are negative numbers, by words that the errors contain in all
-- versions since 6.2. The user may lack the right to a command, and the server may lack a command that its configuration
-- has renamed. The n-th command of this list is then reported as NO_PERMISSION - n or NO_COMMAND - n; Rust has the same
-- list.

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
  elseif says('command called from') then
    problem = NO_COMMAND
  elseif says('MISCONF') or says('NOREPLICAS') then
    -- Redis rejects all writes: it cannot save to disk, or has too few replicas.
    problem = NO_WRITES
  elseif says('non local key') then
    -- The slot is migrating away and this call has deleted a key of the check, so no node creates the key here again.
    -- Nothing was written for the check: it reads its keys first.
    problem = ELSEWHERE
  end
  for place, command in ipairs(RIGHTS) do
    if problem <= NO_PERMISSION and string.match(err, '^%u+') == command then
      problem = problem - place
      break
    end
  end
  failure.problem, failure = problem, failure.before
end
