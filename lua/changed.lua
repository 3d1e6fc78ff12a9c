-- Decides the entries of takes.lua whose value another quota has written, or is of another form: with the functions of
-- meter.lua, as the script of checks does.

local meters, each_times = meter(), {}
while changed do
  local place, text, key = changed.place, ARGV[changed.run], KEYS[changed.place]
  local _, full, units, _, _, times = decode(RUN, text)
  local policy = meters.policy_of(sub(text, RUN_LENGTH + 1), 0)
  local cost = units / policy.interval
  first_error = nil
  local level, at, by, dirty = meters.load(policy, key, now, answers[place])
  local before, charged, number = level, 0, 0
  for _ = 1, times do
    if units == 0 or level + units > full then
      break
    end
    level, at, by = meters.charge(policy, key, now, cost, level, at, by)
    charged = charged + 1
  end
  if charged == 0 and level + units > full then
    local denied, since, writer = meters.denied(policy, now, level, at, by)
    if denied then
      level, at, by, dirty = denied, since, writer, true
    end
  end
  local reset = meters.reset(policy, now, level, at, by)
  if meters.is_of_another(by) then
    local wait = 0
    if level + units > full and units <= full then
      wait = meters.wait(policy, key, now, cost, level, at, by)
    end
    number = #each_times + 1
    each_times[number] = encode(METER, wait, reset, 0)
  end
  if charged > 0 or dirty then
    meters.save(policy, key, now, now + reset + keep, charged * cost, level, at, by)
  end
  if first_error then
    failures = { from = place, to = place, err = first_error, before = failures }
  end
  if times == 1 and charged == 1 then
    answers[place] = encode(METER, now, level, 0)
  else
    answers[place] = encode(METER, now, -1 - before, number)
  end
  changed = changed.before
end
if not failures then
  return table.concat(answers) .. table.concat(each_times)
end
