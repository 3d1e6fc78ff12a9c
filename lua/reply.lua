-- Encodes the reply, after all checks were decided.

-- Replaces the answers of failed checks with the problem.
while failures do
  for i = failures.from + 1, failures.to, 4 do
    reply[i], reply[i + 1], reply[i + 2], reply[i + 3] = failures.problem, 0, 0, 0
  end
  failures = failures.before
end

-- Clients parse one string faster than a list of numbers.
replied = replied + 1
reply[replied] = now
local packed = ''
for from = 1, replied, MOST do
  local to = min(replied, from + MOST - 1)
  packed = packed .. encode('<' .. string.rep('i8', to - from + 1), unpack(reply, from, to))
end
return packed
