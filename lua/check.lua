-- The driver: decides a batch of checks, each of one or more policies of one caller, all or nothing.
--
-- KEYS   for each check, in their order: where its answer is remembered, if its plan says so; one key per policy.
-- ARGV   whole numbers:
--          now             0 for Redis's own time; otherwise microseconds since the Unix epoch, for tests
--          n, n policies   each: strategy, and four numbers for its `policy` function
--          n, n plans      what is asked; each: mode, cost, microseconds for which the answer is remembered under the
--                          check's id (0: it has none), m, m policies by their place above
--          runs            to the end; each: a plan by its place above, and how many checks in a row follow it
-- Reply  whole numbers; for each check and each of its policies four:
--          granted         what was charged or given back; below 0, what was the matter (see `problem`)
--          remaining       the largest cost that would pass now
--          wait            0 if this policy let it pass; microseconds until it would; -1 for never
--          reset           microseconds until nothing is charged any more
--
-- A check may fail by itself. One that is denied, and a peek, write nothing; but a state that another clock or another
-- quota has left behind is put right by a denial too, or its caller might be locked out.

local TAKE, UP_TO, PEEK, CHARGE, GIVE_BACK, RESET = 1, 2, 3, 4, 5, 6

local at = 0
local function argument()
  at = at + 1
  return tonumber(ARGV[at])
end

-- Redis expires keys by its own time; those of another are kept for a day longer than they need.
local now, keep = argument(), 0
do
  local time = call('TIME')
  local real = time[1] * 1000000 + time[2]
  if now == 0 then
    now = real
  else
    keep = real - now + 86400000000
  end
end

local policies = {}
for i = 1, argument() do
  local strategy = strategies[argument()]
  local policy = strategy.policy(argument(), argument(), argument(), argument())
  policy.strategy = strategy
  policies[i] = policy
end

-- The room that a policy must have to let the check pass.
local function needs(mode, cost, capacity)
  if mode == TAKE or mode == PEEK then
    return cost
  elseif mode == UP_TO then
    return min(cost, 1)
  elseif mode == CHARGE then
    return min(cost, 1) - capacity
  end
  return -math.huge
end

local plans = {}
for i = 1, argument() do
  local plan = { mode = argument(), cost = argument(), remember = argument(), policies = {}, needs = {} }
  for j = 1, argument() do
    local policy = policies[argument()]
    plan.policies[j] = policy
    plan.needs[j] = needs(plan.mode, plan.cost, policy.capacity)
  end
  plans[i] = plan
end

-- What a policy would grant, if all let the check pass.
local function grants(mode, cost, room, capacity)
  if mode == TAKE then
    return cost
  elseif mode == UP_TO then
    return min(cost, room)
  elseif mode == PEEK then
    return 0
  elseif mode == CHARGE then
    return min(cost, room + capacity)
  elseif mode == GIVE_BACK then
    return min(cost, capacity - room)
  end
  return capacity - room
end

-- Why Redis refused to write, as a number below 0. The words are those of the versions from 6.2 on.
local function problem(err)
  local function says(words)
    return string.find(err, words, 1, true)
  end
  if says('OOM') then
    return -2
  elseif says('READONLY') then
    return -3
  elseif says('NOPERM') or says('ermission') or says("can't run this command") then
    return -4
  end
  return -1
end

-- The states of one check, each of up to three values; whether they must be saved; and the room in each.
local a, b, c, dirty, rooms = {}, {}, {}, {}, {}
local reply, replied, key_at = {}, 0, 0

local function check(plan)
  local mode, cost, count = plan.mode, plan.cost, #plan.policies
  local granted, pass = math.huge, true
  for i = 1, count do
    local policy = plan.policies[i]
    local strategy = policy.strategy
    a[i], b[i], c[i], dirty[i] = strategy.load(policy, KEYS[key_at + i], now)
    local room = strategy.room(policy, now, a[i], b[i], c[i])
    rooms[i] = room
    pass = pass and room >= plan.needs[i]
    granted = min(granted, grants(mode, cost, room, policy.capacity))
  end
  granted = pass and max(0, granted) or 0
  local charged = mode == GIVE_BACK and -granted or granted

  for i = 1, count do
    local policy, key = plan.policies[i], KEYS[key_at + i]
    local strategy, room, wait, reset, err = policy.strategy, rooms[i], 0, 0, nil
    if room < plan.needs[i] then
      wait = -1
      if plan.needs[i] <= policy.capacity then
        wait = strategy.wait(policy, key, now, plan.needs[i], a[i], b[i], c[i])
      end
    end
    if mode == RESET and granted > 0 then
      err = failure(pcall('DEL', key))
      room = policy.capacity
    else
      if granted > 0 then
        a[i], b[i], c[i] = strategy.charge(policy, key, now, charged, a[i], b[i], c[i])
        room = strategy.room(policy, now, a[i], b[i], c[i])
      end
      reset = strategy.reset(policy, now, a[i], b[i], c[i])
      if granted > 0 or dirty[i] and mode ~= PEEK then
        err = strategy.save(policy, key, now, now + reset + keep, charged, a[i], b[i], c[i])
      end
    end
    reply[replied + 1] = err and problem(err) or granted
    reply[replied + 2] = max(0, room)
    reply[replied + 3] = wait
    reply[replied + 4] = reset
    replied = replied + 4
  end
  key_at = key_at + count
end

local ANSWER, ANSWER_LENGTH = '<I6I6I7', 19

-- Answers as a check of the same id was answered, if there was one. Returns whether it did.
local function repeat_answer(key, count)
  local value = read(key, ANSWER_LENGTH * count)
  if not value then
    return false
  end
  for i = 1, count do
    local granted, remaining, reset = unpack(ANSWER, value, ANSWER_LENGTH * (i - 1) + 1)
    reply[replied + 1], reply[replied + 2], reply[replied + 3], reply[replied + 4] = granted, remaining, 0, reset
    replied = replied + 4
  end
  key_at = key_at + count
  return true
end

-- Decides a check with an id, and remembers what was charged.
local function check_once(plan)
  local key, from = KEYS[key_at + 1], replied
  key_at = key_at + 1
  if repeat_answer(key, #plan.policies) then
    return
  end
  check(plan)
  if reply[from + 1] > 0 then
    local answer = ''
    for i = from + 1, replied, 4 do
      answer = answer .. pack(ANSWER, max(0, reply[i]), reply[i + 1], reply[i + 3])
    end
    write(key, answer, now + plan.remember + keep)
  end
end

local last = #ARGV
while at < last do
  local plan = plans[argument()]
  local decide = plan.remember > 0 and check_once or check
  for _ = 1, argument() do
    decide(plan)
  end
end
return reply
