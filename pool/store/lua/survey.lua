-- survey: what a model holds at this instant, and what has passed through it. Changes nothing.
-- KEY index zset
-- KEY leases zset
-- KEY dead stream
-- KEY tally list
-- KEY totals hash
-- INCLUDE clock
-- FLAGS no-writes
-- RETURN {at_ms, jobs, running, submit time of the oldest job that waits or 0, dead letters, {name, value ...},
--   {line ...} that are not in the totals yet}
-- Further choices of a job have no time in the index, jobs of Programs theirs below zero.
local jobs = redis.call('ZCOUNT', index, 1, '+inf') + redis.call('ZCOUNT', index, '-inf', '(0')
local begun = redis.call('ZRANGE', leases, 0, -1)
local oldest_ms = 0
if jobs > #begun then
  local running = {}
  for _, token in ipairs(begun) do running[token] = true end
  local found = redis.call('ZRANGEBYSCORE', index, 1, '+inf', 'WITHSCORES', 'LIMIT', 0, #begun + 1)
  for i = 1, #found, 2 do
    if not running[found[i]] then
      oldest_ms = tonumber(found[i + 1])
      break
    end
  end
end
return {now_ms(), jobs, #begun, oldest_ms, redis.call('XLEN', dead), redis.call('HGETALL', totals),
  redis.call('LRANGE', tally, 0, -1)}
