-- The reply of take.lua if the take has failed. Uses `failures` with the problem of problem.lua.

return encode(METER, failures.problem, 0, 0)
