-- The reply of takes.lua if takes have failed. Uses `failures` with the problems of problem.lua.

while failures do
  for i = failures.from, failures.to do
    answers[i] = encode(METER, failures.problem, 0, 0)
  end
  failures = failures.before
end
return table.concat(answers)
