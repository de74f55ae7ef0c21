-- add_up: add the oldest lines of what was tallied to the totals, and drop them.
-- KEY tally list lines `name value name value ...`
-- KEY totals hash name -> sum
-- ARG most lines to add at once
-- FLAGS allow-oom
-- RETURN how many lines are left
local sums = {}
local lines = redis.call('LRANGE', tally, 0, most - 1)
for _, line in ipairs(lines) do
  for name, value in string.gmatch(line, '(%S+) (%d+)') do sums[name] = (sums[name] or 0) + value end
end
-- Large numbers without an exponent.
for name, value in pairs(sums) do redis.call('HINCRBY', totals, name, string.format('%.0f', value)) end
redis.call('LTRIM', tally, #lines, -1)
return redis.call('LLEN', tally)
