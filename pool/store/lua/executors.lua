-- executors: the ranks that are registered for a model, and what is wanted of it. Changes nothing.
-- KEY ranks zset
-- KEY told hash
-- KEY model hash
-- INCLUDE clock
-- FLAGS no-writes
-- RETURN {at_ms, {rank, lease end, what it told last, ...}, {field, value, ...} of the model}
local at_ms = now_ms()
local found = {}
local live = redis.call('ZRANGEBYSCORE', ranks, '(' .. at_ms, '+inf', 'WITHSCORES')
for i = 1, #live, 2 do
  local facts = redis.call('HGET', told, live[i])
  if facts then
    for _, value in ipairs({live[i], live[i + 1], facts}) do found[#found + 1] = value end
  end
end
return {at_ms, found, redis.call('HGETALL', model)}
