-- read_on: readers renew their interest in jobs, or (hold = 0) give it up so that the jobs go on without them.
-- KEY timers zset
-- ARG hold ms
-- ARG tokens list at most 100
-- INCLUDE clock
-- FLAGS allow-oom
-- RETURN {"ok", how many timers changed or went}
local count = 0
local until_ms = now_ms() + hold
for _, token in ipairs(tokens) do
  if hold == 0 then
    count = count + redis.call('ZREM', timers, 'reader:' .. token)
  else
    count = count + redis.call('ZADD', timers, 'XX', 'CH', until_ms, 'reader:' .. token)
  end
end
return {'ok', count}
