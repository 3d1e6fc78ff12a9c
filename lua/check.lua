-- The driver: decides a batch of checks, each of one or more policies of one caller, all or nothing.

local TAKE, UP_TO, PEEK, CHARGE, REFUND, RESET, TAKE_AHEAD, RENEW, HOLD = 1, 2, 3, 4, 5, 6, 7, 8, 9

-- Redis expires keys by its own time; those of another are kept for a day longer than they need.
local keep = 0
do
  local time = redis_pcall('TIME')
  if time.err then
    return time
  end
  local real = time[1] * 1000000 + time[2]
  if now == 0 then
    now = real
  else
    keep = real - now + 86400000000
  end
end

local policies, plans, only_runs = {}, {}, true
for i = 1, policy_count do
  local number, first, second, third, fourth = decode(POLICY, ARGV[1 + i])
  local strategy = strategies[number]
  local policy = strategy.policy(first, second, third, fourth)
  policy.strategy = strategy
  policies[i] = policy
end
for i = 1, plan_count do
  local text = ARGV[1 + policy_count + i]
  local mode, cost, remember = decode(PLAN, text)
  local plan = { mode = mode, cost = cost, remember = remember }
  if mode == TAKE_AHEAD then
    plan.within, plan.remember = remember, 0
  end
  local count = (#text - PLAN_LENGTH) / NUMBER_LENGTH
  if mode == REFUND then
    count = (#text - PLAN_LENGTH - CHARGE_OF_LENGTH) / (NUMBER_LENGTH + RESET_OF_LENGTH)
    local charged, age, time, at = decode(CHARGE_OF, text, PLAN_LENGTH + NUMBER_LENGTH * count + 1)
    if time > 0 then
      -- It may have been long on its way. And the clock of that time may have been another: greater is safe.
      age = math.max(age, now - time)
    end
    for place = 1, count do
      local reset
      reset, at = decode(RESET_OF, text, at)
      plan.of = plan.of or {}
      plan.of[place] = { cost = charged, age = age, reset = reset }
    end
  end
  for place = 0, count - 1 do
    plan[place + 1] = policies[(decode(NUMBER, text, PLAN_LENGTH + NUMBER_LENGTH * place + 1))]
  end
  plan.is_take = mode == TAKE and remember == 0 and #plan == 1
  if #plan == 1 and plan[1].counts_requests then
    plan.tells = plan.remember == 0 and (mode == REFUND or mode == RENEW or mode == HOLD)
    if plan.is_take then
      plan.cost = 1
    end
  end
  plans[i], only_runs = plan, only_runs and (plan.is_take or plan.tells)
end

-- It has room for twelve answers from the start: a table that grows is copied whenever it doubles.
local reply = {
  nil,
  nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
  nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
  nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil, nil,
}
local replied, key_at = 0, 0

-- Why Redis refused to read or to write, as a number below 0. The words are those of the versions from 6.2 on.
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
  elseif says('MISCONF') or says('NOREPLICAS') then
    -- It takes no writes at all: it cannot save to disk, or has too few replicas.
    return -5
  end
  return -1
end

-- Replaces the answers between two places in the reply by what was the matter.
local function fail(from, to)
  for i = from + 1, to, 4 do
    reply[i], reply[i + 1], reply[i + 2], reply[i + 3] = problem(trouble), 0, 0, 0
  end
end

-- Repeats the answer that ends at a place in the reply, of so many numbers: who was denied is denied until time goes on.
-- Returns where the last one ends.
local function repeat_last(to, numbers, times)
  for i = to + 1, to + numbers * times do
    reply[i] = reply[i - numbers]
  end
  return to + numbers * times
end

-- Decides what is asked most: takes under one policy, by callers who come once in the run. It does as `check` does, in less
-- time.
local function takes(plan, entries, times)
  local policy, cost, now, reply, n = plan[1], plan.cost, now, reply, replied
  local capacity, strategy = policy.capacity, policy.strategy
  local load, room_in, charge, reset_in = strategy.load, strategy.room, strategy.charge, strategy.reset
  trouble = nil
  local values = read(key_at + 1, key_at + entries)
  local unread = trouble
  for i = 1, entries do
    local key, from, granted, reset = KEYS[key_at + i], n, 0
    trouble = unread
    local a, b, c, dirty = load(policy, key, now, values[i])
    local room = room_in(policy, now, a, b, c)
    for time = 1, times do
      local charged, wait = 0, 0
      if room >= cost then
        if cost > 0 then
          a, b, c = charge(policy, key, now, cost, a, b, c)
          -- What a charge takes of the room is just what it costs.
          charged, granted, room = cost, granted + cost, room - cost
        end
      elseif cost > capacity then
        wait = -1
      else
        wait = strategy.wait(policy, key, now, cost, a, b, c)
      end
      reset = reset_in(policy, now, a, b, c)
      reply[n + 1], reply[n + 2], reply[n + 3], reply[n + 4] = charged, room > 0 and room or 0, wait, reset
      n = n + 4
      if charged == 0 then
        n = repeat_last(n, 4, times - time)
        break
      end
    end
    if not trouble and (granted > 0 or dirty) then
      strategy.save(policy, key, now, now + reset + keep, granted, a, b, c)
    end
    if trouble then
      fail(from, n)
    end
  end
  key_at, replied = key_at + entries, n
end

-- For requests in flight: what a check makes of so many that an instance holds.
local tell, tells
if strategies[8] then
  function tell(mode, cost, own)
    if mode == REFUND then
      return max(0, own - cost)
    elseif mode == HOLD or own == 0 then
      return cost
    end
    return own
  end

  -- Decides what instances tell of what they hold under one policy, of callers who come once in the run.
  function tells(plan, entries, times)
    local policy, mode, cost, reply, n = plan[1], plan.mode, plan.cost, reply, replied
    local strategy = policy.strategy
    -- Those of whom nothing is held any more, and where their answers begin: one command deletes all of them.
    local gone, gone_from = {}, {}
    trouble = nil
    local values = read(key_at + 1, key_at + entries)
    local unread = trouble
    for i = 1, entries do
      local key, from = KEYS[key_at + i], n
      trouble = unread
      local own, others, latest, dirty = strategy.load(policy, key, now, values[i])
      local before, reset = own, 0
      for _ = 1, times do
        local held = tell(mode, cost, own)
        reply[n + 1], own = mode == REFUND and own - held or held, held
        reset = strategy.reset(policy, now, own, others, latest)
        reply[n + 2], reply[n + 3], reply[n + 4] = max(0, strategy.room(policy, now, own, others)), 0, reset
        n = n + 4
      end
      if not trouble and (own ~= before or dirty or mode ~= REFUND) then
        if own == 0 and others == 0 then
          gone[#gone + 1], gone_from[#gone_from + 1] = key, from
        else
          strategy.save(policy, key, now, now + reset + keep, 0, own)
        end
      end
      if trouble then
        fail(from, n)
      end
    end
    trouble = nil
    if #gone > 0 and not try('DEL', unpack(gone)) then
      for i = 1, #gone do
        fail(gone_from[i], gone_from[i] + 4 * times)
      end
    end
    key_at, replied = key_at + entries, n
  end
end

-- What is asked less often: `check` decides one entry, `check_once` one whose answer is remembered.
local check, check_once
if not only_runs then
  -- What a check costs under a policy.
  local function cost_under(policy, mode, cost)
    if policy.counts_requests and (mode == TAKE or mode == TAKE_AHEAD or mode == UP_TO or mode == PEEK) then
      return 1
    end
    return cost
  end

  -- The room that a policy must have to let the check pass.
  local function needs(mode, cost, capacity)
    if mode == TAKE or mode == TAKE_AHEAD or mode == PEEK then
      return cost
    elseif mode == UP_TO then
      return min(cost, 1)
    elseif mode == CHARGE then
      return min(cost, 1) - capacity
    end
    return -math.huge
  end

  -- What a policy would grant, if all let the check pass; what it has to refund, or to forget; what it holds then.
  local function grants(mode, cost, room, policy, own)
    local capacity = policy.capacity
    if mode == TAKE or mode == TAKE_AHEAD then
      return cost
    elseif mode == UP_TO then
      return max(0, min(cost, room))
    elseif mode == PEEK then
      return 0
    elseif mode == CHARGE then
      return max(0, min(cost, room + capacity))
    elseif mode == REFUND then
      return min(cost, policy.counts_requests and own or capacity - room)
    elseif mode == RENEW or mode == HOLD then
      return policy.counts_requests and tell(mode, cost, own) or 0
    end
    return capacity - room
  end

  -- The states of one entry, each of up to three values; whether they must be saved; the room in each; in how long each is
  -- fresh; what was granted of each.
  local a, b, c, dirty, rooms, resets, totals = {}, {}, {}, {}, {}, {}, {}

  -- Whether a cost that there is no room for is due in time, within the debt that the policy bears.
  local function is_due_in_time(plan, i)
    local policy, cost = plan[i], plan.cost
    return cost <= policy.capacity
      and rooms[i] - cost >= -policy.capacity
      and policy.strategy.wait(policy, KEYS[key_at + i], now, cost, a[i], b[i], c[i]) <= plan.within
  end

  -- Asks once, of the states as they are. Returns the most that a policy grants.
  local function ask(plan)
    local mode, count = plan.mode, #plan
    local each = mode == REFUND or mode == RESET or mode == RENEW or mode == HOLD
    local granted, passes = math.huge, true
    for i = 1, count do
      local policy = plan[i]
      local cost = cost_under(policy, mode, plan.cost)
      if rooms[i] < needs(mode, cost, policy.capacity) and not (mode == TAKE_AHEAD and is_due_in_time(plan, i)) then
        granted, passes = 0, false
        break
      end
      -- A request is one under some policies: that bounds no cost under the others.
      if not policy.counts_requests or mode == CHARGE or mode == PEEK then
        granted = min(granted, grants(mode, cost, rooms[i], policy, a[i]))
      end
    end

    local most = 0
    for i = 1, count do
      local policy, key, wait = plan[i], KEYS[key_at + i], 0
      local cost = cost_under(policy, mode, plan.cost)
      local strategy, need = policy.strategy, needs(mode, cost, policy.capacity)
      if rooms[i] < need then
        wait = -1
        if need <= policy.capacity then
          wait = strategy.wait(policy, key, now, need, a[i], b[i], c[i])
        end
      end
      local granted = granted
      if each or passes and policy.counts_requests and mode ~= CHARGE then
        -- What it has itself, or a request.
        granted = grants(mode, cost, rooms[i], policy, a[i])
      end
      if mode == RESET then
        rooms[i], resets[i] = policy.capacity, 0
      else
        if mode == RENEW or mode == HOLD then
          if policy.counts_requests then
            a[i], b[i], c[i] = strategy.charge(policy, key, now, granted - a[i], a[i], b[i], c[i])
            rooms[i] = strategy.room(policy, now, a[i], b[i], c[i])
          end
        elseif granted > 0 then
          if mode == REFUND then
            local given
            given, a[i], b[i], c[i] = strategy.refund(policy, key, now, cost, plan.of[i], a[i], b[i], c[i])
            granted = min(granted, given)
          else
            a[i], b[i], c[i] = strategy.charge(policy, key, now, granted, a[i], b[i], c[i])
          end
          rooms[i] = strategy.room(policy, now, a[i], b[i], c[i])
        end
        resets[i] = strategy.reset(policy, now, a[i], b[i], c[i])
      end
      totals[i], most = totals[i] + granted, max(most, granted)
      reply[replied + 1], reply[replied + 2] = granted, max(0, rooms[i])
      reply[replied + 3], reply[replied + 4] = wait, resets[i]
      replied = replied + 4
    end
    return most
  end

  -- Saves what was granted in all.
  local function save(plan, i)
    local mode, policy, key = plan.mode, plan[i], KEYS[key_at + i]
    if mode == RESET then
      try('DEL', key)
    elseif totals[i] > 0 or dirty[i] and mode ~= PEEK or (mode == RENEW or mode == HOLD) and policy.counts_requests then
      local charged = mode == REFUND and -totals[i] or totals[i]
      policy.strategy.save(policy, key, now, now + resets[i] + keep, charged, a[i], b[i], c[i])
    end
  end

  -- Returns the most that a policy granted the last time.
  function check(plan, times)
    local count, granted, from = #plan, 0, replied
    trouble = nil
    -- Where there was trouble nothing is saved.
    local values = read(key_at + 1, key_at + count)
    for i = 1, count do
      local policy, key = plan[i], KEYS[key_at + i]
      a[i], b[i], c[i], dirty[i] = policy.strategy.load(policy, key, now, values[i])
      rooms[i] = policy.strategy.room(policy, now, a[i], b[i], c[i])
      totals[i] = 0
    end
    for time = 1, times do
      granted = ask(plan)
      if granted == 0 then
        replied = repeat_last(replied, 4 * count, times - time)
        break
      end
    end
    for i = 1, count do
      if not trouble then
        save(plan, i)
      end
    end
    key_at = key_at + count
    if trouble then
      granted = 0
      fail(from, replied)
    end
    return granted
  end

  -- What is remembered under an id: when it was charged, until when that is known, and what each policy answered. Its key
  -- expires with the millisecond, which may be later.
  local TIMES, TIMES_LENGTH = '<I7I7', 14
  local ANSWER, ANSWER_LENGTH = '<I6I6I7', 19

  -- Answers just as a check of the same id was answered, if there was one; but no quota leaves more than its capacity.
  -- Returns when that was charged.
  local function repeat_answer(plan)
    local count, value = #plan, read(key_at + 1, key_at + 1)[1]
    key_at = key_at + 1
    if not value or #value ~= TIMES_LENGTH + ANSWER_LENGTH * count then
      return nil
    end
    local charged_at, forget_at = decode(TIMES, value)
    if now >= forget_at then
      return nil
    end
    for i = 1, count do
      local granted, remaining, reset = decode(ANSWER, value, TIMES_LENGTH + ANSWER_LENGTH * (i - 1) + 1)
      reply[replied + 1], reply[replied + 2] = granted, min(remaining, plan[i].capacity)
      reply[replied + 3], reply[replied + 4] = 0, reset
      replied = replied + 4
    end
    key_at = key_at + count
    return charged_at
  end

  -- Whether the answer that begins in the reply after `from` tells that something was charged: a cost, where a request in
  -- flight stands beside it.
  local function has_charged(plan, from)
    local charged, in_flight = false, 0
    for i = 1, #plan do
      in_flight = in_flight + (plan[i].counts_requests and 1 or 0)
    end
    for i = 1, #plan do
      local tells = in_flight == #plan or not plan[i].counts_requests
      charged = charged or tells and reply[from + 4 * i - 3] > 0
    end
    return charged
  end

  -- Decides a check with an id, which is asked once, and remembers what was charged.
  function check_once(plan)
    local key, from = KEYS[key_at + 1], replied
    local charged_at = repeat_answer(plan)
    if not charged_at and check(plan, 1) > 0 and has_charged(plan, from) then
      local forget_at = now + plan.remember
      local answer = encode(TIMES, now, forget_at)
      for i = from + 1, replied, 4 do
        answer = answer .. encode(ANSWER, max(0, reply[i]), reply[i + 1], reply[i + 3])
      end
      write(key, answer, forget_at + keep)
    end
    replied = replied + 1
    reply[replied] = charged_at or now
  end
end

-- The most keys that one command reads: Lua passes no more than 8,000 values at a time.
local MOST = 4000

for i = 2 + policy_count + plan_count, #ARGV do
  local number, entries, times = decode(RUN, ARGV[i])
  local plan = plans[number]
  if plan.is_take or plan.tells then
    local run = plan.is_take and takes or tells
    for first = 0, entries - 1, MOST do
      run(plan, min(MOST, entries - first), times)
    end
  else
    for _ = 1, entries do
      if plan.remember > 0 then
        check_once(plan)
      else
        check(plan, times)
      end
    end
  end
end
reply[replied + 1] = now
return reply
